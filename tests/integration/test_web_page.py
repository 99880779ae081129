"""The chat page in headless Chromium, as a person uses it: type, read, stop, hover, narrow, dark; against a real server.
Runs in the test's thread, the server in its own; screenshots go to results/screenshots."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.sync_api import BrowserContext, Page, expect, sync_playwright

from infer import Engine, EngineConfig
from infer.testing.fake_engine import fake_engine, scripted
from integration.live_server import LiveServer, live_server

pytestmark = pytest.mark.heavy

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SCREENSHOTS = Path(__file__).parents[2] / "results" / "screenshots"
ANSWER = "Grüße from Paris 🙂\n<b>not bold</b>"
KEY = "a-key-of-the-test"


def answering(config: EngineConfig) -> Engine:
    return fake_engine(scripted(ANSWER), config, latency=0.01)


TEMPLATE = (
    "{# <tool_call> <think> #}{{ tools | tojson if tools else '' }}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)
THOUGHT = "They ask <b>me</b>."
REASONED = (
    f"<think>\n{THOUGHT}\n</think>\n\nSnow."
    '<tool_call>\n{"name": "look_up", "arguments": {"city": "Oslo"}}\n</tool_call>'
)
TOOLS = '[{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]'


def reasoning(config: EngineConfig) -> Engine:
    return fake_engine(scripted(REASONED), config, latency=0.005)


def endless(config: EngineConfig) -> Engine:
    return fake_engine(lambda ids, sampling: ord("abc "[len(ids) % 4]), config, latency=0.02)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(answering) as running:
        yield running


Open = Callable[..., Page]


@pytest.fixture(scope="module")
def open_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Opens the page in a browser of its own; any complaint of the browser's fails the test that opened it."""
    contexts: list[BrowserContext] = []
    with sync_playwright() as playwright:

        def open_it(
            url: str, *, width: int = 1100, height: int = 760, scheme: Any = "light", touch: bool = False
        ) -> Page:
            while contexts:
                contexts.pop().close()
            context = playwright.chromium.launch_persistent_context(
                tmp_path_factory.mktemp("profile"),
                executable_path=CHROMIUM,
                headless=True,
                args=FLAGS,
                viewport={"width": width, "height": height},
                color_scheme=scheme,
                has_touch=touch,
            )
            contexts.append(context)
            context.set_default_timeout(20_000)
            expect.set_options(timeout=20_000)
            page = context.new_page()
            page.complaints = []  # type: ignore[attr-defined]
            page.on("pageerror", lambda error: page.complaints.append(str(error)))  # type: ignore[attr-defined]
            page.on("console", lambda m: page.complaints.append(m.text) if m.type == "error" else None)  # type: ignore[attr-defined]
            page.goto(url + "/")
            expect(page.locator("#model option")).not_to_have_text("…")
            return page

        yield open_it
        while contexts:
            contexts.pop().close()


def ask(page: Page, text: str) -> None:
    page.locator("#prompt").fill(text)
    page.keyboard.press("Enter")


def asked(page: Page, text: str) -> None:
    """Ask, and wait for the end of the answer."""
    ask(page, text)
    expect(page.locator("#go")).to_have_text("Send")
    expect(page.locator(".facts").last).to_contain_text("token")


def shot(page: Page, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"chat_{name}.png")


def test_a_question_is_answered_with_the_history_of_the_chat(server: LiveServer, open_page: Open) -> None:
    page = open_page(server.url)
    sent: list[dict[str, Any]] = []
    page.on("request", lambda r: sent.append(r.post_data_json) if "/chat/" in r.url else None)
    asked(page, "Where from?")
    answer = page.locator(".answer")
    assert answer.text_content() == ANSWER, "text is shown as text, never as markup"
    page.locator("#gear").click()
    page.locator("#temperature").fill("0.5")
    page.locator("#max-tokens").fill("99")
    page.locator("#system").fill("Be brief.")
    asked(page, "And then?")
    shot(page, "light")
    assert sent[0]["messages"] == [{"role": "user", "content": "Where from?"}]
    assert "temperature" not in sent[0], "the model's own default until it is set"
    assert sent[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where from?"},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "And then?"},
    ]
    assert (sent[1]["temperature"], sent[1]["max_tokens"]) == (0.5, 99)
    facts = page.locator(".facts").last
    expect(facts).to_contain_text(f"{len(ANSWER.encode()) + 1} tokens")
    assert float(re.search(r"([\d.]+) tokens/s", facts.inner_text())[1]) > 0  # type: ignore[index]
    page.locator("#fresh").click()
    expect(page.locator(".answer")).to_have_count(0)
    asked(page, "Anew")
    assert sent[2]["messages"][1:] == [{"role": "user", "content": "Anew"}]
    assert page.complaints == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_stop_frees_the_request_and_keeps_the_text(open_page: Open, way: str) -> None:
    with live_server(endless) as server:
        page = open_page(server.url)
        ask(page, "Go on for ever")
        expect(page.locator(".answer")).to_contain_text("abc abc")
        expect(page.locator(".facts")).to_contain_text("tokens/s")  # shown while it runs
        assert server.statistics().running == 1
        if way == "button":
            page.get_by_role("button", name="Stop").click()
        else:
            page.keyboard.press("Escape")
        expect(page.locator(".facts")).to_contain_text("stopped by you")
        server.wait_for(lambda now: now.running == 0 and now.waiting == 0)
        kept = page.locator(".answer").text_content()
        assert kept and set(kept) <= set("abc ")
        expect(page.locator(".wrong")).to_have_count(0)
        sent: list[dict[str, Any]] = []
        page.on("request", lambda r: sent.append(r.post_data_json) if "/chat/" in r.url else None)
        ask(page, "more")
        expect(page.locator(".answer").last).to_contain_text("abc")
        assert sent[0]["messages"][1] == {"role": "assistant", "content": kept}


def test_hovering_shows_how_likely_a_token_was(server: LiveServer, open_page: Open) -> None:
    page = open_page(server.url)
    asked(page, "Hi")
    tip = page.locator("#tip")
    expect(tip).to_be_hidden()
    page.locator(".tok", has_text="G").first.hover()
    expect(tip).to_contain_text("36.8 %")  # the scripted engine says exp(-1) of every token
    page.locator(".tok", has_text="ü").hover()
    expect(tip).to_contain_text("2 tokens make this text")
    shot(page, "hover")
    page.locator("h1").hover()
    expect(tip).to_be_hidden()
    page.locator(".answer").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".tok.here")).to_have_text("r")
    expect(tip).to_be_visible()
    expect(page.locator("#said")).to_have_text("r 36.8 %")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    page.locator("#gear").click()
    page.locator("#shade").check()
    colour = page.locator(".tok").first.evaluate("element => getComputedStyle(element).backgroundColor")
    assert colour not in ("rgba(0, 0, 0, 0)", "transparent")


@pytest.mark.parametrize("width", [360, 1100])
def test_thoughts_are_folded_and_calls_shown(open_page: Open, width: int) -> None:
    with live_server(reasoning, model={"chat_template": TEMPLATE}, cache={"num_blocks": 500}) as server:
        page = open_page(server.url, width=width)
        sent: list[dict[str, Any]] = []
        page.on("request", lambda r: sent.append(r.post_data_json) if "/chat/" in r.url else None)
        page.locator("#gear").click()
        page.locator("#tools").fill("[{")
        page.locator("#gear").click()
        ask(page, "Weather?")
        expect(page.get_by_role("alert")).to_contain_text("Tools")
        assert sent == [], "what is no JSON is not sent"
        page.locator("#gear").click()
        page.locator("#tools").fill(TOOLS)
        page.locator("#gear").click()
        page.get_by_role("button", name="Again").click()
        expect(page.locator(".calls")).to_have_text('Calls look_up {"city": "Oslo"}')
        expect(page.locator("#go")).to_have_text("Send")
        assert page.locator(".answer").text_content() == "Snow."
        assert page.locator(".answer .tok").last.text_content() == ".", (
            "no token of a thought or a call stands in the answer"
        )
        page.locator(".answer .tok").last.hover()
        expect(page.locator("#tip .chosen code, #tip .row code").first).to_have_text(".")
        thought = page.locator(".thought div")
        expect(thought).to_be_hidden()
        page.locator(".thought summary").click()
        expect(thought).to_be_visible()
        assert (thought.text_content() or "").rstrip() == THOUGHT, "shown as text, never as markup"
        soft, plain = (
            page.locator(e).evaluate("(e) => getComputedStyle(e).color") for e in (".thought div", ".answer")
        )
        assert soft != plain
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        shot(page, f"thought_{width}")
        asked(page, "And now?")
        assert [m["role"] for m in sent[-1]["messages"]] == ["user", "assistant", "user"]
        assert sent[-1]["messages"][1]["content"].strip() == "Snow.", "what was thought is not said again"
        assert page.complaints == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [360, 768])
def test_a_narrow_window_scrolls_in_one_direction_only(server: LiveServer, open_page: Open, width: int) -> None:
    page = open_page(server.url, width=width, height=720, touch=True)
    asked(page, "A" * 300)
    page.locator(".tok").last.hover()
    for name in (f"{width}", f"{width}_settings"):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        beyond = page.evaluate(
            """() => [...document.querySelectorAll("body *")].filter((e) => e.getClientRects().length
               && !e.closest(".away") && e.getBoundingClientRect().right > innerWidth + 0.5).map((e) => e.outerHTML)"""
        )
        assert beyond == []
        shot(page, name)
        if page.locator("#side").is_hidden():
            page.keyboard.press("Escape")  # the tooltip goes first
            page.locator("#gear").click()
            expect(page.locator("#max-tokens")).to_be_in_viewport()
    page.keyboard.press("Escape")
    expect(page.locator("#side")).to_be_hidden()


def luminance(colour: str) -> float:
    red, green, blue = (
        (v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4)
        for v in (int(part) / 255 for part in re.findall(r"\d+", colour)[:3])
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_system_and_are_readable(server: LiveServer, open_page: Open, scheme: str) -> None:
    page = open_page(server.url, scheme=scheme)
    asked(page, "Colours?")
    shot(page, scheme)
    style = "(e) => getComputedStyle(e)"
    ground = page.locator("body").evaluate(f"(e) => ({style})(e).backgroundColor")
    assert (luminance(ground) < 0.2) == (scheme == "dark")
    for element in (".answer", ".facts", "#model"):
        ink = page.locator(element).first.evaluate(f"(e) => ({style})(e).color")
        low, high = sorted((luminance(ink), luminance(ground)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, f"{element}: {ink} on {ground} is too faint to read (WCAG AA)"


def test_errors_are_shown_readably_and_a_question_can_be_put_again(open_page: Open) -> None:
    api = {"api_keys": [KEY], "max_logprobs": 0}
    with live_server(answering, api=api) as server:
        page = open_page(server.url)
        expect(page.locator("#model")).to_have_text("API key needed")
        ask(page, "Let me in")
        wrong = page.get_by_role("alert")
        expect(wrong).to_contain_text("This server asks for an API key")
        expect(page.locator("#key")).to_be_focused()
        page.locator("#key").fill(KEY)
        page.get_by_role("button", name="Again").click()
        expect(page.locator(".answer")).to_contain_text("Paris")  # without log-probabilities, which it refuses
        expect(wrong).to_have_count(0)
        expect(page.locator("#go")).to_have_text("Send")
        assert KEY not in page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        page.locator("#temperature").fill("9")
        ask(page, "hot")
        expect(wrong).to_contain_text("Temperature")
        page.locator("#temperature").fill("")
        page.locator("#max-tokens").fill("100000")
        page.get_by_role("button", name="Again").click()
        expect(wrong).to_contain_text("refused")
        expect(wrong).to_contain_text("2048")
        page.locator("#max-tokens").fill("")
        page.get_by_role("button", name="Again").click()
        expect(page.locator(".answer").last).to_contain_text("Paris")
        page.reload()
        assert page.locator("#key").input_value() == "", "the key is forgotten"
    ask(page, "Anybody there?")
    expect(wrong).to_contain_text("The server cannot be reached")


def test_a_stream_cut_short_is_said_to_be_so(open_page: Open) -> None:
    with live_server(endless) as server:
        page = open_page(server.url)
        ask(page, "Go on for ever")
        expect(page.locator(".answer")).to_contain_text("abc")
    expect(page.get_by_role("alert")).to_contain_text("The answer was cut off")
    expect(page.locator("#go")).to_have_text("Send")


def test_the_keyboard_is_enough(server: LiveServer, open_page: Open) -> None:
    page = open_page(server.url)
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    expect(page.locator(".mine")).to_have_text("Youone\ntwo")
    expect(page.locator(".answer")).to_contain_text("Paris")
    expect(page.get_by_role("button", name="Again")).to_be_visible()
    reached = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.id || document.activeElement.className || document.activeElement.textContent"
            )
        )
    assert {"fresh", "gear", "answer", "Copy", "Again", "prompt"} <= reached
    page.get_by_role("button", name="Again").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#go")).to_be_focused()
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, select")]
           .filter((e) => !(e.textContent || "").trim() && !e.labels?.length && !e.ariaLabel).map((e) => e.outerHTML)"""
    )
    assert unnamed == []


def test_the_page_is_served_with_a_policy_that_holds_for_it() -> None:
    source = resources.files("infer.api.web").joinpath("index.html").read_bytes()
    assert not re.search(rb"(?:src|href)=.?https?:|url\(|@import", source), "no outside resource"
    with live_server(answering, api={"api_keys": [KEY]}) as server:
        reply = httpx2.get(server.url + "/")
    assert (reply.status_code, reply.content) == (200, source), "the page itself needs no key"
    policy = dict(rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    for tag in ("script", "style"):
        part = re.search(rf"<{tag}>(.*?)</{tag}>".encode(), source, re.DOTALL)
        assert part is not None
        assert policy[f"{tag}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(part[1]).digest()).decode()}'"
