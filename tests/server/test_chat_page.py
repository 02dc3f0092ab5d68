"""The chat page in Chromium, against a server that answers from a script. SCREENSHOTS=DIR keeps pictures of it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.stand_in import PAGE, Body, Script, StandIn, chunk, serve

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "<img src=x onerror=\"document.title='broken in'\"> <b>&amp;</b>"


def test_page_is_whole_and_asks_nobody_else() -> None:
    """No inline code, so that a strict policy can hold, and no address but the server's own."""
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)
    for file in PAGE.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*|(?<=\s)// .*|/\*.*?\*/", "", text, flags=re.MULTILINE), file
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b",
                         (PAGE / "app.js").read_text(encoding="utf-8"))
    for name in re.findall(r'(?:src|href)="([^"]+)"', html):
        assert name.startswith("data:") or (PAGE / name).is_file()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as engine:
        launched = engine.chromium.launch(executable_path=CHROMIUM, args=[
            "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync"])
        yield launched
        launched.close()


def repeat(wait: float, event: Body) -> Script:
    return (wait, event) * 200


def answer(body: Body) -> Script:
    match body["messages"][-1]["content"]:
        case "evil":
            return [EVIL[:12], 0.02, EVIL[12:]]
        case "slow":
            return ["One", 0.05, " two", *repeat(0.05, chunk({"content": ""}))]
        case "silent":
            return [*repeat(0.05, chunk({"role": "assistant"})), "never"]
        case "think":
            return [chunk({"reasoning_content": "Let me"}), chunk({"reasoning_content": " see."}), 0.02, "Done."]
        case "refuse":
            raise ValueError("max_tokens=0 is not allowed: 1 or more")
        case "break":
            return ["Half", {"error": {"message": "the engine stopped"}}]
        case "long":
            return ["word " * 40 + "\n"] * 20 + ["x" * 400, " end"]
        case _:
            return ["The sky", 0.01, " is blue", 0.01, " because\n", "air scatters", 0.02, " light."]


@pytest.fixture
def server() -> Iterator[StandIn]:
    with serve(StandIn(answer)) as state:
        yield state


@pytest.fixture
def page(browser: Any, server: StandIn) -> Iterator[Any]:
    """The page, opened. Fails if a script failed or the policy stopped anything."""
    context = browser.new_context(viewport={"width": 1100, "height": 720})
    page = context.new_page()
    page.set_default_timeout(15_000)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" and
            not message.text.startswith("Failed to load resource") else None)
    page.goto(server.url)
    yield page
    context.close()
    assert complaints == []


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def texts(page: Any) -> list[str]:
    return page.locator(".message > .text").all_text_contents()


def finished(page: Any, count: int = 1) -> None:
    page.locator(".facts").nth(count - 1).wait_for()


def shoot(page: Any, name: str) -> None:
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_a_conversation(page: Any, server: StandIn) -> None:
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Max tokens").fill("64")
    page.get_by_label("Seed").fill("7")
    ask(page, "Why is the sky blue?")
    finished(page)
    said = "The sky is blue because\nair scatters light."
    assert texts(page) == ["Why is the sky blue?", said]
    assert re.fullmatch(r"5 tokens · [\d.]+ tokens/s · first after \d+ ms", page.locator(".facts").text_content())
    ask(page, "And at dusk?")
    finished(page, 2)
    assert server.bodies[0] == {
        "model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5,
        "max_tokens": 64, "seed": 7, "messages": [{"role": "system", "content": "Be brief."},
                                                  {"role": "user", "content": "Why is the sky blue?"}]}
    assert [one["role"] for one in server.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert server.bodies[1]["messages"][2]["content"] == said
    shoot(page, "wide")
    page.emulate_media(color_scheme="dark")
    shoot(page, "dark")
    page.get_by_role("button", name="New chat").click()
    ask(page, "Again")
    finished(page)
    assert len(server.bodies[2]["messages"]) == 2


def test_text_is_text(page: Any) -> None:
    ask(page, "evil")
    finished(page)
    assert texts(page) == ["evil", EVIL] and page.title() == "jaxserve chat"
    assert page.locator("#log img, #log b").count() == 0


def test_reasoning_stands_apart(page: Any, server: StandIn) -> None:
    ask(page, "think")
    finished(page)
    assert page.locator(".thoughts .text").text_content() == "Let me see." and texts(page) == ["think", "Done."]
    ask(page, "more")
    finished(page, 2)
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "Done."}
    shoot(page, "thoughts")


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stopping(page: Any, server: StandIn, how: str) -> None:
    ask(page, "slow")
    page.get_by_text("One two").wait_for()
    shoot(page, "streaming")
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    finished(page)
    assert server.disconnected.wait(5)  # the server can stop too
    assert "about 2 tokens" in page.locator(".facts").text_content() and texts(page) == ["slow", "One two"]
    ask(page, "next")  # what was said stays in the conversation
    finished(page, 2)
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "One two"}


def test_stopping_before_anything_came(page: Any, server: StandIn) -> None:
    ask(page, "silent")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Send").wait_for()
    assert page.get_by_label("Message").input_value() == "silent" and texts(page) == []
    assert page.locator(".error").count() == 0


def test_errors_are_shown(page: Any, server: StandIn) -> None:
    ask(page, "refuse")
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert alert.text_content() == "400 max_tokens=0 is not allowed: 1 or more"
    assert page.get_by_label("Message").input_value() == "refuse" and texts(page) == []
    shoot(page, "error")
    ask(page, "break")
    finished(page)
    assert alert.text_content() == "the engine stopped" and texts(page) == ["break", "Half"]
    ask(page, "next")
    finished(page, 2)
    assert alert.count() == 0


def test_values_out_of_range_are_not_sent(page: Any, server: StandIn) -> None:
    page.get_by_label("Temperature").fill("9")
    ask(page, "hello")
    assert server.bodies == [] and page.get_by_label("Message").input_value() == "hello"


def test_api_key(page: Any, server: StandIn) -> None:
    server.key = "secret"
    ask(page, "hello")
    page.get_by_role("alert").wait_for()
    assert page.evaluate("document.activeElement.id") == "key"
    page.keyboard.type("secret")
    ask(page, "hello")
    finished(page)
    page.reload()
    assert page.get_by_label("API key").input_value() == "secret"
    assert page.evaluate("localStorage.length") == 0 and "secret" not in page.content()


def test_load_of_the_server(page: Any) -> None:
    page.locator("#running", has_text="3").wait_for()
    assert page.locator("#waiting").text_content() == "12" and page.locator("#cache-text").text_content() == "25 %"
    assert page.get_by_label("Model").input_value() == "tiny"


def test_keyboard_alone(page: Any, server: StandIn) -> None:
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "send"
    page.keyboard.press("Enter")
    finished(page)
    assert server.bodies[0]["messages"][0]["content"] == "one\ntwo"
    names = []
    for _ in range(14):
        page.keyboard.press("Shift+Tab")
        names.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"log", "key", "seed", "system", "SUMMARY", "clear", "model"} <= set(names)


@pytest.mark.parametrize("width", [320, 390])
def test_narrow_screens(page: Any, width: int) -> None:
    """Nothing sticks out, the message box can be reached, and long answers scroll inside."""
    page.set_viewport_size({"width": width, "height": 640})
    page.reload()
    assert not page.locator("#system").is_visible()
    ask(page, "long")
    finished(page)
    inside = "(page => page.scrollWidth <= innerWidth && page.scrollHeight <= innerHeight)(document.documentElement)"
    assert page.evaluate(inside)
    box = page.get_by_role("button", name="Send").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] + box["height"] <= 640
    assert page.locator("#log").evaluate("log => log.scrollHeight - log.scrollTop - log.clientHeight < 2")
    shoot(page, f"narrow-{width}")
    page.get_by_text("Settings").click()
    page.get_by_label("API key").scroll_into_view_if_needed()
    assert page.evaluate(inside)
    shoot(page, f"narrow-settings-{width}")
