"""The engine's step, compiled for a GPU that is not there: what `bench.compiled_report` prints."""
