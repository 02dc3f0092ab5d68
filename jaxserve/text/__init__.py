"""Text on the host: tokenizing, incremental detokenizing, stop strings and chat templates. Imports no jax."""

from jaxserve.text.chat import ChatTemplate
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.stop import StopChecker
from jaxserve.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "StopChecker", "Tokenizer"]
