"""Side constraints: one sentence of a user message that governs the rest of the session.

Written apart from the ledger's extraction rules, and not to be used for tuning them. Explicit wordings have a signal
word ("never", "always"), implicit ones have none.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.lib.measuring import JsonDict, Transcript

EXPLICIT = (
    "Never push anything to the release branch without asking me first.",
    "All dates you show me have to be in the form day.month.year.",
    "You must not install any further packages on this machine.",
    "Bitte antworte mir ab jetzt immer auf Deutsch, auch wenn ich Englisch schreibe.",
    "No cambies nunca los nombres de las funciones públicas.",
    "请不要修改任何以 legacy 开头的文件。",
    "Ne supprime jamais les commentaires déjà présents.",
    "Amounts are always to be rounded down, whatever the customer says.",
)
IMPLICIT = (
    "My colleague reads this afterwards and she is blind, so tables are of no use to her.",
    "The people who run this still have Python 3.7.",
    "I pay for every request to that service out of my own pocket.",
    "Unser Betriebsrat liest alle Protokolle mit, Namen von Mitarbeitern haben darin nichts verloren.",
    "La red de este cliente no tiene salida a internet.",
    "我对花生过敏。",
    "Mon chef déteste les abréviations.",
    "The laptop that this runs on has four gigabytes of memory.",
)


def planted(transcript: Transcript, place: str, sentence: str) -> Transcript | None:
    """The conversation with `sentence` in one user message; None where it has no such place.

    Args:
        transcript: the conversation.
        place: `top` (inside the first message of the user), `middle` or `late`: a turn of its own, behind a quarter
            or three fifths of the conversation, which the assistant acknowledges.
        sentence: what has to survive.
    """
    messages = transcript.messages
    first = next(index for index, message in enumerate(messages) if message["role"] == "user")
    if place == "top":
        text = messages[first]["content"]
        at = text.find("\n\n") if "\n\n" in text else len(text)
        changed = {**messages[first], "content": f"{text[:at]}\n\n{sentence}{text[at:]}"}
        return _with(transcript, [*messages[:first], changed, *messages[first + 1 :]])
    return spoken(transcript, 0.25 if place == "middle" else 0.6, sentence)


def spoken(transcript: Transcript, share: float, sentence: str) -> Transcript | None:
    """The conversation in which the user says `sentence` behind so much of it; None where there is no such place."""
    messages = transcript.messages
    for index in range(max(int(len(messages) * share), 2), len(messages) - 1):
        if messages[index]["role"] == "user":
            changed = {**messages[index], "content": f"{messages[index]['content']}\n{sentence}"}
            return _with(transcript, [*messages[:index], changed, *messages[index + 1 :]])
        if messages[index]["role"] == "assistant" and messages[index - 1]["role"] == "tool":
            turn: list[JsonDict] = [
                {"role": "assistant", "content": "I have looked at that."},
                {"role": "user", "content": f"One more thing. {sentence} Go on now."},
            ]
            return _with(transcript, [*messages[:index], *turn, *messages[index:]])
    return None


def _with(transcript: Transcript, messages: Sequence[JsonDict]) -> Transcript:
    return Transcript(transcript.name, list(messages), transcript.tools, [])
