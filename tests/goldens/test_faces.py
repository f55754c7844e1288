"""What pure faces say of made-up conversations and requests, a line for each: where a change of any number is felt.

A line holds how many things a face has said and a digest of them, for each kind of conversation.
`GOLDENS=write pytest tests/goldens -n 0` writes the file anew; its diff belongs into the commit that changes it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import prometheus_client
import pytest

from litellm_compaction.config import Settings
from litellm_compaction.core import budget as budgets
from litellm_compaction.core import (
    compaction,
    cuts,
    forms,
    identity,
    judging,
    ledger,
    messages,
    plan,
    portable,
    prompts,
    pruning,
    refusal,
    rounds,
    stretches,
    transcripts,
    view,
)
from litellm_compaction.core.go_on import Partial, can_end_in_answer, continued_request
from litellm_compaction.core.joiner import Joiner
from litellm_compaction.events import Outcome, TruncationAlarm
from litellm_compaction.proxy import routing, wire
from litellm_compaction.proxy.metrics import Metrics
from litellm_compaction.windows.windows import Window
from tests.builders import DEPTH, RULES, budget, conversation, count, parsed
from tests.core.restarts import CHATTER
from tests.goldens.tellers import TELLS, Teller, read, recorded
from tests.proxy.test_metrics import Library
from tests.test_events import CUT, event

_FILE = Path(__file__).parent / "faces.txt"
_SIZES = (24, 60, 130, 300, 700, 1600)
_RECORD = compaction.Compaction(covered_messages=1, covered_hash="", start=1)
Messages: TypeAlias = tuple[messages.Message, ...]


def _told(kind: str, least: int) -> Messages:
    """A conversation of one kind that ends where a model would answer."""
    teller = Teller(f"faces {kind}")
    tells = TELLS[kind](teller)
    raw = [*itertools.islice(tells, least)]
    while raw[-1]["role"] == "assistant" or "tool_calls" in raw[-1]:
        raw.append(next(tells))
    for at, each in enumerate(raw):
        file = f'<file path="a.py">\n{teller.anything(at % 16)}\n</file>'
        if each["role"] == "tool":
            each["content"] = "\n" * (at % 2) + each["content"] * (1 + at % 7) + "\nx" * (at % 3)
        elif each["role"] == "user" and isinstance(each["content"], list):
            each["content"].insert(at % 2, file)
        elif each["role"] == "user" and at % 3 == 0:
            each["content"] = f"{each['content']}\n\n{file}" if at % 2 else f"{file}\n{each['content']}"
    return stretches.marked(parsed(raw))


def _turns(kind: str) -> Iterator[Messages]:
    yield from (_told(kind, least) for least in (1, 4, 9, 16, 30, 60))


def _texts(kind: str) -> Iterator[str]:
    yield from (each.text for each in _told(kind, 60) if each.text)


def _budgets(kind: str) -> Iterator[object]:
    changes: dict[str, Any] = {
        "chat": {},
        "agent": {"reserve_tokens": 3000},
        "pasted": {"threshold_tokens": 2000},
        "pictures": {"keeps_what_fits": True, "pre_request_ratio": 0.3},
        "values": {"output_buffer_ratio": 0.05, "answer_min_tokens": 1024, "streaming_ratio": 0.97},
    }
    rules = replace(RULES, **changes[kind])
    for window_tokens, share, ratio in itertools.product(range(700, 12_000, 487), (0.02, 0.3, 0.6), (1.0, 1.025, 1.2)):
        floor_tokens = int(share * window_tokens)
        own = budgets.Budget(
            rules=rules,
            window_tokens=window_tokens,
            floor=partial(int, floor_tokens),
            likely_ratio=ratio,
            fixed_tokens=floor_tokens // 2,
        )
        for each in (own, replace(own, is_wanted=True), own.with_trigger(window_tokens // 2)):
            yield each.trigger_tokens, each.early_start_tokens, each.latest_start_tokens, each.waiting_tokens
            for tokens in (floor_tokens + 90, window_tokens // 2, each.trigger_tokens + 1):
                yield each.target_tokens(tokens), each.target_tokens(tokens, 0.65), each.nears_trigger(tokens)
                yield each.triggers(tokens), each.fits(tokens), each.max_output_tokens(tokens, tokens // 2)
                yield each.max_output_tokens(tokens, None), each.restart_room_tokens(tokens)
                yield each.needed_window_tokens(tokens), budgets.gained_tokens(tokens)


def _plans(kind: str) -> Iterator[object]:
    options = [
        replace(DEPTH, strategy=strategy, keep_images=at, rereads=at == 1, writes_whole_records=at == 2)
        for at, strategy in enumerate(prompts.STRATEGIES.values())
    ]
    some = itertools.islice(_turns(kind), 1, None, 2)
    for told, share, depth in itertools.product(some, (0.2, 0.8, 1.1, 1.3), options):
        shown = conversation(told)
        window_tokens = max(1024, int(share * shown.tokens))
        limits = budget(window_tokens, shown)
        for wanted in (limits, replace(limits, is_wanted=True)):
            decided = plan.plan(shown, wanted, depth, ())
            yield decided
            if isinstance(decided, plan.Make):
                made = replace(decided.steps[-1].draft, ledger="- port 9143")
                yield compaction.applied_tokens(shown, made), compaction.apply(told, made)
                later = conversation((*told, *parsed([{"role": "assistant", "content": "Done. " * 40}]), *told[-1:]))
                yield plan.plan(later, replace(wanted, floor=partial(getattr, later, "floor_tokens")), depth, [made])
        after = conversation(plan.turn_ended(told, "It is done."))
        limits = budget(window_tokens, after)
        yield from (plan.plan_next(after, limits, depth, (), is_expected=each) for each in (True, False))
        yield plan.expected_growth_tokens(after, window_tokens)


def _views(kind: str) -> Iterator[object]:
    for told in _turns(kind):
        for length in range(1, len(told) + 1):
            shown = conversation(told[:length])
            yield shown.requests, shown.latest_cut, shown.cuts, shown.floor_tokens, shown.task
            yield view.request_text(shown.messages), sorted(rounds.within_rounds(shown.messages))
        records = [replace(_RECORD, covered_messages=at) for at in range(1, len(told))]
        yield [each.covered_messages for each in compaction.superseded(records)]
        yield [shown.kept_tokens(cut) for cut in shown.cuts], shown.own_words_tokens(range(len(shown.rest)))
        covered = shown.cuts[-1] if shown.cuts else 0
        yield [shown.newest_images(covered, most=most, most_tokens=999 * most) for most in range(4)]


def _ledgers(kind: str) -> Iterator[object]:
    for told, size in itertools.product(_turns(kind), _SIZES):
        written = ledger.ledger(told, budget_tokens=size, count=count, task=1, task_tokens=size // 4)
        yield written, portable.ledger_messages(f"{written}\n{written}")
    yield ledger.ledger(parsed([{"role": "tool", "content": "\n".join(_texts(kind))}]), budget_tokens=500, count=count)


def _stretches(kind: str) -> Iterator[object]:
    for each in _told(kind, 80):
        yield [found[2:] for found in stretches.stretches_of(each)] if each.role == "user" else stretches.divided(each)


def _forms(kind: str) -> Iterator[object]:
    for told in _turns(kind):
        lines = forms.lines_for(told)
        yield lines, forms.in_forms(told, [forms.Form(at, "line") for at in lines])
        yield forms.in_forms(told, [forms.Form(at, at * 9 % 200) for at in range(1, len(told), 2)], start=3)
        order = forms.ClearOrder(above_calls=2)
        yield forms.cleared(told, order, 100), forms.cleared(told, replace(order, above_tokens=99, inputs=True), 100)
        shown = conversation(told)
        yield identity.seen(shown.rest, shown.hashes), identity.words_chain(told)
        yield forms.state_calls(told), [messages.roughly_tokens(each.text) for each in told]
    for text, name in itertools.product(_texts(kind), ("read", "run")):
        yield forms.called(messages.ToolCall(id="c", name=name, arguments=text[:130]))


def _cut_data(kind: str) -> Iterator[object]:
    """What stands where a result was, a line longer each time; a piece of it with a client's mark, or a note."""
    for text in (text for text in _texts(kind) if len(text) > 400):
        was = [identity.prints(each) for each in parsed([{"role": "tool", "content": text}])]
        heads = [f"{text[:size]}\n... [truncated]" for size in range(96, len(text), 7)]
        ends = [f"{text[: size // 2]}…{text[-size // 2 :]}" for size in range(96, len(text), 7)]
        notes = [f"[{'old words ' * size}]" for size in range(1, 60)]
        raw = [{"role": "tool", "content": each} for each in (*heads, *ends, *notes, "[a]", "[a bc def]")]
        yield [identity.edits([each], was) for each in parsed(raw)]


def _texts_cut(kind: str) -> Iterator[object]:
    for text, size in itertools.product(_texts(kind), (9, *_SIZES)):
        yield cuts.excerpt(text, size, count), cuts.ends(text, size), cuts.about(text, text.split()[3:9], size, count)
        yield cuts.settled_length(text[:size]), cuts.settled_length(text[:size].replace(" ", ""))
        yield cuts.common_level([len(word) for word in text.split()], [1] * len(text.split()), size)
        partial = Partial(text=text * (size > 60), reasoning=text[size:], closes=size == 60)
        asked = _told(kind, 1)
        yield continued_request(asked, partial, tail_tokens=size, count=count), can_end_in_answer(asked, partial)


def _joined(kind: str) -> Iterator[object]:
    """The continuation begins anew some characters before the end, in the same words or after others."""
    for text, head in zip(_texts(kind), itertools.cycle(("", *CHATTER, "```python", "Sure, continuing:\n\n"))):
        partial = text[: cuts.settled_length(text[: len(text) * 2 // 3])]
        for back, is_trusted in itertools.product((0, 1, 3, 5, 6, 7, 9, 11, 12, 13, 20, 23, 24, 25, 60), (False, True)):
            joiner = Joiner(partial, shown=partial[-back:] if back else "", is_trusted=is_trusted)
            start = max(len(partial) - back, 0)
            sent = joiner.feed(f"{head}\n{text[start:]}" if head else text[start:]) + joiner.finish()
            yield sent, joiner.opening, joiner.removed_text, joiner.echoed_text


def _asked(kind: str) -> Iterator[object]:
    for told, size, parts in itertools.product(_turns(kind), _SIZES, (1, 3)):
        yield prompts.transcript_parts(told, room_tokens=size, max_parts=parts, count=count)
    for told, size in itertools.product(_turns(kind), _SIZES):
        yield pruning.plan_tokens(size, len(told))
        yield pruning.pruning_prompt(
            prompt="Which may go? {words}",
            values={"words": size},
            request="Go on.",
            earlier="",
            messages=told,
            sizes=conversation(told).sizes,
            limit_tokens=4 * size,
            count=count,
        )


def _pruned(kind: str) -> Iterator[object]:
    for told in _turns(kind):
        draft = compaction.bare(conversation(told))
        if draft is not None:
            rest, whole = conversation(told).rest, replace(draft, start=0)
            choices = pruning.offered(rest, whole)
            for least, step in itertools.product((0, 2), (1, 2, 3)):
                wishes = pruning.Wishes(frozenset(choices[least::step]), frozenset(choices[1::step]))
                yield pruning.pruned(rest, whole, choices, wishes)
                plans: tuple[object, ...] = (
                    {"drop": [f"{least}-{step + 4}", step]},
                    {"shorten": [1, {"n": step}], "summary": "So."},
                    {"prunedConversation": [each.raw for each in rest[least::step]]},
                )
                yield [_answered(f"Well: {json.dumps(each)}", rest, choices) for each in plans]


def _answered(answer: str, rest: Messages, choices: Sequence[int]) -> object:
    try:
        return pruning.read_answer(answer, rest, choices)
    except ValueError as error:
        return str(error)


def _judged(kind: str) -> Iterator[object]:
    said = [*_texts(kind)]
    rules = ("Never delete {}.", "The assistant must always ask before {}.", "Do not use {} at all.")
    for at, text in enumerate(said):
        words = text.split()[: 4 + at]
        lines = [" ".join(words), rules[at % 3].format(" ".join(words[1:5])), *text.splitlines()[:3], " ".join(words)]
        for summary in ("\n".join(lines), "\n".join(lines[: 1 + at % 3] * 3), " ".join(words[:2] * at), text[:at]):
            yield judging.judged(summary, instruction=said[at - 1][:200], source=said[: at + 1])


def _rendered(kind: str) -> Iterator[object]:
    for told, form in itertools.product(_turns(kind), ("{}: {}", "### {}\n{}", '{{"role": "{}", "content": "{}"}}')):
        text = "\n".join(form.format(each.role, each.text) for each in told)
        message = messages.user_message(f"Sum it up.\n\n{text}\n\nNow.")
        yield transcripts.turns(text), transcripts.rendered_in([message])
        yield [transcripts.with_fewer_turns(message, tokens, count).text for tokens in (*_SIZES, count(text) - 70)]


def _refused(kind: str) -> Iterator[object]:
    for told, window_tokens in itertools.product(_turns(kind), (700, 1024, 2048)):
        shown = conversation((*told, *told[-1:] * 3))
        limits = budget(window_tokens, shown)
        yield str(refusal.refusal("m", shown, limits, 9)), str(refusal.too_long("m", shown.tokens, limits, "why"))
        for view_of in (shown, conversation(told[-1:])):
            yield refusal.shortened(view_of, limits, tool_results=True, user_message=True)
            yield [refusal.with_less_data(view_of, limits, tokens) for tokens in range(40, window_tokens, 61)]
        yield portable.read_record([portable.headed(each, 2) for each in told])


_FIELDS = (
    *("max_tokens", "max_completion_tokens", "n_predict", "n", "n_cmpl", "best_of", "logprobs", "top_logprobs", "stop"),
    *("prompt", "tools", "functions", "response_format", "grammar", "extra_body", "thinking", "reasoning", "documents"),
    *("reasoning_effort", "chat_template", "stream_options", "custom_llm_provider", "model", "model_info", "input"),
    *("thinking_budget_tokens", "reasoning_budget_tokens", "generationConfig", "output_config", "chat_template_kwargs"),
)
_ODD: tuple[object, ...] = (
    *(None, True, False, 0, 1, 2, 30, -1, 2.5, "2", "x", "high", [], ["a", "b", "c", "d"], [1, 2], "y" * 65, ["a", 7]),
    *({}, {"type": "text"}, {"type": "json", "n": 3, "stop": "a"}, {"effort": "max"}, {"budget_tokens": 9}),
    *(10**400, math.inf, math.nan, "9" * 19, " 600.5 ", "-1", {"thinkingConfig": {"thinkingBudget": 0}}, [2], "xhigh"),
    *([{"id": "a"}], {"include_usage": True}, {"max_tokens": 5, "model": "b"}, [{"id": "a", "type": "item_reference"}]),
)


def _bodies(kind: str) -> Iterator[object]:
    luck = Teller(kind).luck
    for _ in range(800):
        body = {name: luck.choice(_ODD) for name in luck.sample(_FIELDS, luck.randint(1, 6))}
        yield wire.asked_output_tokens(body), wire.asked_thoughts_tokens(body), wire.asks_for_usage(body)
        yield wire.is_structured(body), wire.stops(body), wire.can_be_continued(body), wire.asked_logprobs(body)
        yield wire.asked_answers(body), wire.client_texts(body)(), wire.extras_of(body), wire.decode_text(body)
        yield wire.with_output_limit(body, 99), wire.can_be_begun(body), wire.begun(body, "Go.", luck.choice(["", "E"]))
        yield wire.without_overrides(body, "openai"), wire.to_chats_alone(body, "openai"), wire.refusing(body, "ollama")
        yield [
            str(wire.not_served({**body, "compaction": 1}, f"/v1/{route}", keeps=partial(bool, at), is_read=bool(at)))
            for at, route in enumerate(("responses", "messages"))
        ]


def _deployments(kind: str) -> Iterator[object]:
    luck = Teller(kind).luck
    hosts = ("", "10.0.0.7", "192.168.1.9:1234", "https://api.openai.com/v1", "box.lan", "http://[::1]:80", "8.8.8.8")
    models = ("gpt-4o", "o3", "openai/gpt-4o", "lm_studio/qwen", "ollama/llama", "openai/responses/x", "hosted_vllm/a")
    models += ("lm_studio/", "lm_studio//", "lm_studio/a/b", "claude-sonnet-4-5", "responses/x", "x/chat_completions/y")
    variables = ("OPENAI_API_BASE", "OLLAMA_API_BASE", "OPENAI_API_KEY", "OPENAI_BASE_URL", "LM_STUDIO_API_BASE")
    pools = {"model": models, "api_base": (*hosts, None), "custom_llm_provider": (None, None, "openai")}
    sections = (None, {"enabled": True}, {"enabled": False}, {"enabled": True, "context_length": 9000})
    limits = (None, 0, 1, 4096.0, True, 1e9, 2e9, "4096")
    for _ in range(300):
        params = {name: luck.choice(values) for name, values in pools.items()}
        info = {"id": "a", "compaction": luck.choice(sections), "max_input_tokens": luck.choice(limits)}
        environ, is_asked = {luck.choice(variables): luck.choice(hosts)}, luck.random() < 0.3
        shown = routing.deployment_of(params, info, group="g", environ=environ, is_asked=is_asked)
        yield shown, shown.is_foreign, shown.is_asked_first, routing.carrier_of(shown, Settings())
        pattern, name = luck.choice(("*", "lm_studio/*", "*o", "a.*", "gpt-4o")), luck.choice(models)
        yield routing.serves(pattern, name), routing.without_route(name)
        window = Window(tokens=luck.randint(600, 9000), source="api/v1", instance_id="")
        yield routing.limits_of(window, Settings())


def _metrics(kind: str) -> Iterator[object]:
    library, luck = Library(), Teller(kind).luck
    seen = Metrics(lambda: library)
    alarm = TruncationAlarm(model="m", window_tokens=1, expected_tokens=2, reported_tokens=1, reason="far below")
    for number in range(250):
        reason = luck.choice(("", "prepared"))
        outcome: Outcome = luck.choice(("compacted", "refused", "prepared"))
        before, calls = luck.randint(1, 2_000_000), luck.randint(0, 2)
        seen.observe(event(outcome, model=f"m{number}", reason=reason, tokens_before=before, summary_calls=calls))
        seen.observe(luck.choice((alarm, CUT)))
    text = prometheus_client.generate_latest(library.REGISTRY).decode()
    yield [line for line in text.splitlines() if line[0] != "#" and "_created" not in line]


_FACES = {
    face.__name__.strip("_"): face
    for face in (
        *(_budgets, _plans, _views, _ledgers, _stretches, _forms, _cut_data),
        *(_texts_cut, _joined, _asked, _pruned, _judged, _rendered, _refused),
        *(_bodies, _deployments, _metrics),
    )
}


@pytest.mark.parametrize("face", _FACES)
def test_the_answers_are_as_recorded(face: str) -> None:
    """Of each kind of conversation the same things, to the letter."""
    lines = [", ".join(f"{kind} {_digest([*_FACES[face](kind)])}" for kind in TELLS)]
    assert lines == recorded(_FILE, face, lines)


def test_every_recorded_face_is_asked() -> None:
    assert [*read(_FILE)] == sorted(_FACES)


def _digest(said: Sequence[object]) -> str:
    digest = hashlib.blake2b(repr(said).encode("utf-8", "surrogatepass"), digest_size=4)
    return f"{len(said)} {digest.hexdigest()}"
