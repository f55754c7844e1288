"""Threat: secrets that are written down. None enters a ledger, a summary or a store; names, ids and paths stay."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_compaction.config import settings_from
from litellm_compaction.core import secrets
from litellm_compaction.core.ledger import ledger
from litellm_compaction.core.messages import parse_message
from litellm_compaction.core.secrets import MARKER, redacted, redactor
from litellm_compaction.engine import build
from litellm_compaction.engine.build import _rewritten
from litellm_compaction.errors import ConfigError, SummaryFailed
from tests.builders import tool_round
from tests.engine.bench import Bench, FakeAsk
from tests.engine.test_guard import LONG
from tests.stores.compactions import compaction

H = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
# (text, what must go); what stands before it stays. Built from halves, so that no scanner takes this file for a leak.
SECRETS: tuple[tuple[str, str], ...] = (
    ("DB_PASSWORD=hunter2", "hunter2"),
    ("export DB_PASSWORD='correct horse'", "correct horse"),
    ("password: swordfish1", "swordfish1"),
    ("Passwort: Sommer2026!", "Sommer2026!"),
    ("my password is S3cretP4ss", "S3cretP4ss"),
    ("das Passwort lautet `Affe123`", "Affe123"),
    ("密码是abc12345", "abc12345"),
    ('{"password": "p@ss w0rd"}', "p@ss w0rd"),
    ('{\\"api_key\\": \\"abc123def456\\"}', "abc123def456"),
    ("api_key: 'a1b2c3d4e5f6'", "a1b2c3d4e5f6"),
    ("API-KEY = 0123456789abcdef", "0123456789abcdef"),
    ("x-api-key: 0123456789abcdef", "0123456789abcdef"),
    ("client_secret=Zm9vYmFy", "Zm9vYmFy"),
    ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCY"),
    ("aws_access_key_id = AKIA" + "IOSFODNN7ABCDEFG", "AKIA" + "IOSFODNN7ABCDEFG"),
    ("use sk-" + "ant-api03-abcDEF123456_-xyz789 please", "sk-" + "ant-api03-abcDEF123456_-xyz789"),
    ("sk-" + "proj-abcdef1234567890abcdef", "sk-" + "proj-abcdef1234567890abcdef"),
    ("ghp_" + "abcdefghijklmnopqrstuvwxyz0123456789", "ghp_" + "abcdefghijklmnopqrstuvwxyz0123456789"),
    ("github_pat_" + "11ABCDEFG0abcdefghijkl_mnop", "github_pat_" + "11ABCDEFG0abcdefghijkl_mnop"),
    ("glpat-" + "abcdefghij0123456789", "glpat-" + "abcdefghij0123456789"),
    ("xoxb-" + "123456789012-abcdefABCDEF", "xoxb-" + "123456789012-abcdefABCDEF"),
    ("https://hooks.slack.com/services/" + "T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX", "B00000000/XXXX"),
    ("AIza" + "SyA1234567890abcdefghijklmnopqrstuv", "SyA1234567890abcdefghijklmnopqrstuv"),
    ("hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH", "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH"),
    ("sk_" + "live_abcdefghijklmnop1234", "live_abcdefghijklmnop1234"),
    (f"session {JWT}", JWT),
    (f"Authorization: Bearer {JWT}", JWT),
    ("Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
    ("-H 'Authorization: token abcdef123456'", "abcdef123456"),
    ('"Authorization": "Bearer abcdef1234567890xyz"', "abcdef1234567890xyz"),
    ("bearer abcdef1234567890xyz", "abcdef1234567890xyz"),
    ("Cookie: session=abcdef123456; theme=dark", "abcdef123456"),
    ("postgres://app:s3cr3t@db.internal:5432/app", "s3cr3t"),
    ("redis://:s3cr3t@10.0.0.1/0", "s3cr3t"),
    ("https://user:pa%24s@example.org/x", "pa%24s"),
    ("Server=db;User Id=sa;Password=Str0ng!Pass;", "Str0ng!Pass"),
    ("AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq==", "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1"),
    ("curl -u admin:geheim99 https://x", "geheim99"),
    ("mysql --password geheim99", "geheim99"),
    ("tool --token=geheim99", "geheim99"),
    ("?access_token=abcdef123&x=1", "abcdef123"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\nabcd1234\n-----END RSA PRIVATE KEY-----", "MIIEpAIBAAKCAQEA"),
    ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEA\nAAAAB3Nza", "b3BlbnNzaC1rZXktdjEA"),
    ('"-----BEGIN PRIVATE KEY-----\\nMIIEvQIBADANBgkq\\nhkiG9w0B\\n-----END PRIVATE KEY-----\\n"', "MIIEvQIBADANBgkq"),
    ("DB_PASS=winter77", "winter77"),
    ("ADMIN_PW=winter77", "winter77"),
    ("MY_SERVICE_KEY=a1b2c3d4", "a1b2c3d4"),
    ("//registry.example/:_auth=am9lOndpbnRlcjc3", "am9lOndpbnRlcjc3"),
    ('"auth": "dXNlcjpwYXNzd29yZA=="', "dXNlcjpwYXNzd29yZA=="),
    ("<password>winter77</password>", "winter77"),
    ("define('DB_PASSWORD', 'winter 77')", "winter 77"),
    ("| db password | winter77 |", "winter77"),
    ("password\twinter77", "winter77"),
    ("use winter77 as the password", "winter77"),
    ('variable "db_password" {\n  type = string\n  default = "winter77"\n}', "winter77"),
    ("password: |\n  winter77\n", "winter77"),
    ("Password:\nwinter77\n", "winter77"),
    ("mot de passe : winter77", "winter77"),
    ("senha: winter77", "winter77"),
    ("пароль: winter77", "winter77"),
    ("hasło: winter77", "winter77"),
    ("wachtwoord = winter77", "winter77"),
    ("パスワード：winter77", "winter77"),
    ("비밀번호: winter77", "winter77"),
    ("curl -ujoe:winter77 https://x", "winter77"),
    ("mysql -u root -pwinter77 shop", "winter77"),
    ("sshpass -p winter77 ssh host", "winter77"),
    ("redis-cli -h cache -a winter77 ping", "winter77"),
    ("htpasswd -bc users joe winter77", "winter77"),
    ("machine example.org login joe password winter77", "winter77"),
    ("db.internal:5432:shop:joe:winter77", "winter77"),
    ("root:$6$" + "saltsalt$" + "a1B2" * 12 + ":19000:0", "a1B2a1B2"),
    ("$2b$" + "12$" + "a1B2" * 13 + "c", "a1B2a1B2"),
    ("docker login -u joe -p winter77 registry.example", "winter77"),
    ("openssl rsa -passin pass:winter77 -in k", "winter77"),
    ("aws configure set aws_secret_access_key winter77winter77", "winter77winter77"),
    ("LTAI" + "a1B2" * 5, "a1B2a1B2"),
    ("rubygems_" + "a1b2" * 12, "a1b2a1b2"),
    ("nvapi-" + "a1B2" * 16, "a1B2a1B2"),
    ("pul-" + "a1b2" * 10, "a1b2a1b2"),
    ("sk-" + "lm-ab12cd34:" + "a1B2" * 5, "a1B2a1B2"),
    ("xai-" + "a1B2" * 20, "a1B2a1B2"),
    ("pplx-" + "a1b2" * 12, "a1b2a1b2"),
    ("hvs" + "." + "a1B2" * 8, "a1B2a1B2"),
    ("ATATT3" + "xFfGF0" * 20, "xFfGF0xFf"),
    ("dapi" + "a1b2" * 8, "a1b2a1b2"),
    ("lin_" + "api_" + "a1B2" * 10, "a1B2a1B2"),
    ("ntn_" + "a1B2" * 11, "a1B2a1B2"),
    ("123456789:" + "AA" + "a1B2" * 8 + "c", "a1B2a1B2"),
    ("glcbt-" + "a1B2" * 6, "a1B2a1B2"),
    ("sbp_" + "a1b2" * 10, "a1b2a1b2"),
    ("pscale_" + "tkn_" + "a1B2" * 10, "a1B2a1B2"),
    ("glsa_" + "a1B2" * 8 + "_1234abcd", "a1B2a1B2"),
    ("NRAK-" + "A1B2" * 6 + "C3D", "A1B2A1B2"),
    ("sntrys_" + "a1B2" * 15, "a1B2a1B2"),
    ("figd_" + "a1B2" * 10, "a1B2a1B2"),
    ("PMAK-" + "a1b2" * 6 + "-" + "a1b2" * 8 + "c3", "a1b2a1b2"),
    ("dp." + "pt." + "a1B2" * 10 + "c3d", "a1B2a1B2"),
    ("FlyV1 " + "fm2_" + "a1B2" * 20, "a1B2a1B2"),
    ("tskey-" + "auth-k1CNTRL-" + "a1B2" * 6, "a1B2a1B2"),
    ("mailgun key-" + "a1b2" * 8, "a1b2a1b2"),
    ("a1b2" * 8 + "-us12", "a1b2a1b2"),
    ("sq0" + "atp-" + "a1B2" * 6, "a1B2a1B2"),
    ("twilio SK" + "a1b2" * 8, "a1b2a1b2"),
    ("airtable pat" + "a1B2c3D4e5F6g7." + "a1b2" * 16, "a1b2a1b2"),
    ("https://x.blob.core.windows.net/c?sv=2022&sig=" + "a1B2" * 11 + "%3D", "a1B2a1B2"),
    ("https://b.s3.amazonaws.com/k?X-Amz-Signature=" + "a1b2" * 16, "a1b2a1b2"),
    ("abc8Q~" + "a1B2" * 8 + "c3", "a1B2a1B2"),
    ("1//" + "0" + "a1B2" * 12, "a1B2a1B2"),
    ("https://discord.com/api/webhooks/123456789012/" + "a1B2" * 15, "a1B2a1B2"),
    ("Private-Lines: 2\n" + "a1B2" * 16 + "\nabcd\nPrivate-MAC: 0", "a1B2a1B2"),
    ("...\n" + "a1B2" * 16 + "\n" + "c3D4" * 8 + "\n-----END RSA PRIVATE KEY-----", "a1B2a1B2"),
)
# What terminals and pages put before a secret or into it, unseen.
HIDDEN_BY = (
    *(
        "\x1b[32m",
        "\x1b[1;38;5;196m",
        "\\u001b[0m",
        "\\x1b[32m",
        "\\033[1m",
        "\\e[32m",
        "\u200b",
        "\u2060",
        "\ufeff",
        "\xad",
    ),
)
# What stays as it is.
HARMLESS = (
    f"commit {H}",
    "id 3fa85f64-5717-4562-b3fc-2c963f66afa6",
    "sha256:" + "ab12" * 16,
    "max_tokens: 4096",
    "prompt_tokens=1234, completion_tokens=56",
    "token: str",
    "token = 42",
    "def login(user: str, password: str) -> Token:",
    "password = None",
    "password=password",
    "token = parse_token(text)",
    "api_key = os.environ['API_KEY']",
    "api_key=settings.api_key,",
    "PASSWORD_FILE=/run/secrets/db",
    "password: ${DB_PASSWORD}",
    "password: <your password>",
    "token: $TOKEN",
    "secret: /run/secrets/x",
    "the key: value pairs",
    "key=value",
    "primary key: id",
    "tokens are counted; the token limit is 4096",
    "the password is wrong",
    "token expired: invalid",
    "https://example.org:8080/path@2x.png",
    "git@github.com:org/repo.git",
    "docker run -u 1000:1000 image",
    "src/auth/token.py:12: error",
    "sk-learn-contrib-estimators-and-more",
    "Authorization: $TOKEN",
    "cookie: string",
    "authorization: required",
    "credentials: include",
    "fetch(url, {credentials: 'same-origin'})",
    "password: 'Passwort'",
    "token: Token::Ident",
    "token: *default_token",
    "password: vault:secret/data/db#password",
    "encryption key: AES-256",
    "first_pass: results",
    "sort -u names | cut -d: -f2",
    "| password | string |",
    "<token>string</token>",
    "password:\nusername: joe1\n",
    "mysql -h db -p shop",
    "mkdir -p shop/mysql",
    "keep the id as the token 12 says",
    "\x1b[32mgreen\x1b[0m is a colour, \u200band that has no width",
    "-----BEGIN PUBLIC KEY-----\nMIIBIjANBgkqh\n-----END PUBLIC KEY-----",
)


@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_secrets_go_and_their_names_stay(text: str, secret: str) -> None:
    """A marker stands in the secret's place; again changes nothing."""
    found = redacted(f"before {text} after")
    assert secret not in found
    assert MARKER in found
    assert found.startswith("before ")
    assert redacted(found) == found


_LINES = st.sampled_from([text for text, _ in SECRETS] + list(HARMLESS) + ["", "ein İ und ß", "a plain line"])
_ENDS = st.sampled_from(["\n", "\r\n", "\r", "\u2028", "; ", " "])


@given(st.lists(st.tuples(_LINES, _ENDS), max_size=12))
def test_searching_lines_finds_what_searching_everything_does(lines: list[tuple[str, str]]) -> None:
    """Only lines with a hint are searched; nothing that a search through the whole text finds may be missed."""
    text = "".join(map("".join, lines))
    everything = secrets._without_keys(text)
    for *_, search in secrets._SEARCHES:
        everything = search(everything)
    assert redacted(text) == everything


def test_the_name_is_kept() -> None:
    """Whoever reads the ledger knows which secret there was."""
    assert redacted("DB_PASSWORD=hunter2") == f"DB_PASSWORD={MARKER}"
    assert redacted("postgres://app:s3cr3t@db:5432/app") == f"postgres://app:{MARKER}@db:5432/app"


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text: str) -> None:
    """Ids, hashes, paths, types, code and placeholders: the ledger needs them."""
    assert redacted(text) == text


@pytest.mark.parametrize("hidden_by", HIDDEN_BY)
@pytest.mark.parametrize("token", ["ghp_" + "a1B2" * 9, "AKIA" + "IOSFODNN7ABCDEFG", JWT, "password: winter77"])
def test_colours_and_characters_without_a_width_hide_no_secret(token: str, hidden_by: str) -> None:
    """Before it, and in its midst."""
    for text in (f"see {hidden_by}{token} now", f"see {token[:6]}{hidden_by}{token[6:]} now"):
        found = redacted(text)
        assert MARKER in found
        assert token[-6:] not in found


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_no_secret_enters_a_ledger(role: str) -> None:
    """Whoever said it, also where it is longer than a ledger's line."""
    texts = [text for text, _ in SECRETS] + [f"value {number} in src/a{number}.py" for number in range(40)]
    messages = [parse_message({"role": role, "content": text}) for text in texts]

    def tokens(text: str) -> int:
        return len(text) // 4

    found = ledger(messages, budget_tokens=4000, count=tokens)
    assert "src/a1.py" in found
    assert [secret for _, secret in SECRETS if secret in found] == []


async def test_no_secret_enters_a_store() -> None:
    """Neither from the conversation nor from a summary that quotes it, and what the model reads has the marker too."""
    raw = [
        *LONG[:2],
        {"role": "user", "content": "DB_PASSWORD=hunter2 is ours"},
        {"role": "assistant", "content": "ok"},
    ]
    raw += LONG[2:]
    bench = Bench(ask=FakeAsk("## State\nThe login uses DB_PASSWORD=hunter2, and all else is as it was."))
    guarded = await bench.guard(raw)
    assert guarded.action == "compacted"
    (kept,) = [compaction for _, compaction in bench.store.kept]
    assert "hunter2" not in repr(kept)
    assert MARKER in kept.segments[0].text


@pytest.mark.parametrize("looked", ["where it is made", "before it is kept"])
async def test_no_secret_enters_the_ledger_of_an_edit(looked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old results make room without a model; what a ledger keeps of them is looked at twice, each by itself enough."""
    if looked == "where it is made":
        monkeypatch.setattr(build, "_rewritten", lambda compaction, redact: compaction)
    else:
        made = build.ledger
        monkeypatch.setattr(build, "ledger", lambda *given, **named: made(*given, **{**named, "redact": str}))
    raw = [{"role": "user", "content": "Set the login up."}]
    for number in range(6):
        result = f"DB_PASSWORD=hunter{number}2\nwrote src/login{number}.py\n" + f"line {number} of it\n" * 120
        raw += tool_round(f"read_{number}", result, f"call-{number}")
    bench = Bench(ask=FakeAsk(SummaryFailed("empty")))
    raw += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "And?"}]
    guarded = await bench.guard(raw, 3000)
    assert guarded.action == "compacted"
    (kept,) = [compaction for _, compaction in bench.store.kept]
    assert kept.stubbed, "results were cleared"
    assert "src/login0.py" in kept.ledger
    assert MARKER in kept.ledger
    assert "hunter02" not in repr(kept)


async def test_an_operators_patterns_keep_theirs_out_of_a_store() -> None:
    """From the settings to what is written."""
    raw = [*LONG[:2], {"role": "user", "content": "Customer KD-123456 asks"}, {"role": "assistant", "content": "ok"}]
    bench = Bench(ask=FakeAsk("## State\nCustomer KD-123456 is served first, and all else is as it was in the text."))
    guarded = await bench.guard([*raw, *LONG[2:]], redact_patterns=[r"KD-\d{6}"])
    assert guarded.action == "compacted"
    (kept,) = [compaction for _, compaction in bench.store.kept]
    assert "KD-123456" not in repr(kept)
    assert f"Customer {MARKER}" in repr(kept)


def test_whatever_is_written_is_looked_at_once_more() -> None:
    """Every text of a compaction, wherever it came from."""
    (text, secret), *_ = SECRETS
    written = _rewritten(
        replace(
            compaction("x"), ledger=text, omissions=text, segments=(replace(compaction("x").segments[0], text=text),)
        ),
        redacted,
    )
    assert secret not in repr(written)
    assert repr(written).count(MARKER) == 3


_ROLES = ("user", "assistant", "tool")


def test_a_longer_chat_has_no_more_messages_cleaned() -> None:
    """Of short messages a ledger reads the newest; all of them were cleaned where no tool had said anything."""

    def cleaned(messages: int, newer: int = 0) -> int:
        seen: list[str] = []

        def looking(text: str) -> str:
            seen.append(text)
            return text

        chat = [parse_message({"role": _ROLES[at % 2], "content": f"{at} " + 40 * "word "}) for at in range(messages)]
        covered = messages - newer
        ledger(chat[:covered], budget_tokens=2_000, count=len, redact=looking)
        return len(seen)

    assert cleaned(6_000) == cleaned(3_000) < 3_000
    assert cleaned(9_000, newer=6_000) < 3_000


def test_off_keeps_everything() -> None:
    """`redact: off` is the operator's word."""
    assert settings_from({"redact": False}).redact == "off"
    assert settings_from({"redact": "on"}).redact == "on"


def test_an_operators_patterns_are_used() -> None:
    """The group `secret` goes, or all of a match."""
    redact = redactor((r"KD-\d{6}", r"PIN (?P<secret>\d{4})"))
    assert redact("Kunde KD-123456, PIN 1234") == f"Kunde {MARKER}, PIN {MARKER}"


def test_a_pattern_may_match_between_letters() -> None:
    """Nothing is there to be taken out."""
    assert redactor((r"\b", r"(?=KD)"))("KD-1 and KD-2") == "KD-1 and KD-2"


def test_a_pattern_that_would_never_end_is_ended() -> None:
    """What is searched already is kept, the rest is left out: nothing is written down unsearched."""
    redact = redactor((r"(?:a|aa)+\$",))
    assert redact("ordinary words") == "ordinary words"
    text = "word " * 20_000 + "a" * 80 + "! PIN 1234"
    found = redact(text)
    assert found.endswith(secrets.TOO_SLOW)
    assert text.startswith(found.removesuffix(secrets.TOO_SLOW))
    assert "1234" not in found


async def test_a_pattern_that_takes_too_long_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """By its model and the size of the text, not by a word of it."""
    bench = Bench(ask=FakeAsk(f"## State\nThe customer is {'a' * 80}!"))
    guarded = await bench.guard([*LONG[:9], LONG[-1]], 2048, redact_patterns=[r"(?:a|aa)+\$"])
    assert guarded.action == "compacted"
    assert "redact_patterns_slow model=" in caplog.text
    assert "aaaa" not in caplog.text
    assert all("aaaa" not in str(message.raw) for message in guarded.messages or ())


@pytest.mark.parametrize("strategy", ["summary", "prune"])
async def test_an_operators_patterns_are_searched_beside_the_event_loop(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may be slow, also where the conversation is short."""
    threads: list[int] = []
    here = threading.get_ident()

    def redactor_of(patterns: tuple[str, ...]) -> Callable[[str], str]:
        found = redactor(patterns)
        return lambda text: (threads.append(threading.get_ident()), found(text))[1]

    monkeypatch.setattr(build, "redactor", redactor_of)
    bench = Bench(ask=FakeAsk("## State\nThe customer is KD-123456, and all else is as it was in the text before."))
    short = [*LONG[:9], LONG[-1]]
    assert sum(len(str(message["content"])) for message in short) < 20_000
    guarded = await bench.guard(short, 2048, redact_patterns=[r"KD-\d{6}"], strategy=strategy)
    assert guarded.action == "compacted"
    assert threads
    assert here not in threads


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("a*", "empty"),
        ("(", "pattern"),
        ("", "empty"),
        ("x{0,3}", "empty"),
        ("a" * 3000, "long"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused_at_start(pattern: str, problem: str) -> None:
    """The error says which one, and why."""
    with pytest.raises(ConfigError, match=problem):
        settings_from({"redact_patterns": [pattern]})
