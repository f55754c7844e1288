"""Summaries as good models write them: five languages, sections, hand-offs, and free text of a pruning."""

from __future__ import annotations

from typing import NamedTuple

from litellm_compaction.core.prompts import STRATEGIES


class Good(NamedTuple):
    """A summary, of which strategy, and words of the conversation that it stands for."""

    strategy: str
    text: str
    said: str


INSTRUCTION = STRATEGIES["summary"].instruction(words=200, round_number=1)
REAL = "### Current state\nThe lexer of src/parser.py is ported, and 58 of 60 tests pass now.\n"


def source(said: str = "Please port src/parser.py to Rust; the tests must stay green. ") -> list[str]:
    return [said * 10]


_ENGLISH = "Please port src/parser.py to Rust. Never touch the CI files. The tests must stay green at all times. "
_GERMAN = "Bitte portiere src/parser.py nach Rust. Die CI-Dateien bleiben unberührt. Alle Tests müssen grün bleiben. "
_FRENCH = "Merci de porter src/parser.py en Rust. Ne touche jamais aux fichiers de CI. Les tests doivent rester verts. "
_RUSSIAN = "Перенеси src/parser.py на Rust. Файлы CI не трогай. Все тесты должны оставаться зелёными. "
_CHINESE = "请把 src/parser.py 移植到 Rust。不要修改 CI 文件。所有测试必须一直通过。"

# What was said in all of them: the values that good summaries take over.
WORK = [
    (
        "$ wc -l src/parser.py\n412 src/parser.py\n$ rustc --version\nrustc 1.82.0 (f6e511eec 2026-10-15)\n"
        "$ cargo test\nerror[E0502]: cannot borrow `*self` as mutable\n  --> src/parser.rs:88:17\n"
        "write_file(path: src/lexer.rs)\n31 tests passed\nCreated src/driver.rs, Cargo.toml and tests/nested.rs\n"
        "failures: test_nested_call, test_trailing_comma\ntest result: FAILED. 58 passed; 2 failed\n"
        "src/parser.py:42: if self.peek() == ',': self.next()\n"
    ),
    "The lexer is done. I decided against a parser generator because the grammar is not LL(1).",
    "Keep the commits small, please.",
]

GOOD = [
    # English
    Good(
        "summary",
        "### Original task\nPort src/parser.py to Rust; never touch the CI files; tests stay green.\n"
        "### Completed work\n| File or component | Action | Description |\n|---|---|---|\n"
        "| src/parser.py | read | 412 lines, hand-written recursive descent |\n"
        "| src/lexer.rs | created | tokens and spans; 31 tests pass |\n"
        "| src/parser.rs | created | expressions done, statements half done |\n"
        "### Key technical decisions\nNo parser generator: the grammar is not LL(1). Spans are byte offsets.\n"
        "### Current state\ncargo test: 58 passed, 2 failed (test_nested_call, test_trailing_comma).\n"
        '### Pending\n- [ ] fix the trailing comma\n- [ ] port statements\n### Errors and resolutions\nE0502 → "clone"',
        _ENGLISH,
    ),
    Good(
        "summary",
        "### Original task\nThe user's first request was: port src/parser.py to Rust.\n"
        "### Completed work\nThe lexer was ported. The tests pass.\n### Current state\nWorking on statements.",
        _ENGLISH,
    ),
    Good(
        "handoff",
        "### 1. Primary goals and intent\nPort the parser; CI files stay.\n### 2. Timeline and progress\n"
        "1. Lexer ported.\n2. Expressions ported.\n### 3. Technical context and decisions\nRust 1.82, no macros.\n"
        "### 4. Files and code changes\nsrc/lexer.rs: new.\n### 5. Active work and last actions\n`cargo test` failed.\n"
        "### 6. Unresolved issues and pending tasks\n- [ ] E0502 in parser.rs:88\n### 7. Immediate next step\nClone.",
        _ENGLISH,
    ),
    Good(
        "handoff",
        "### 1. Primary goals and intent\nA refund for order 4711.\n### 2. Timeline and progress\nnone\n"
        "### 3. Technical context and decisions\nnone\n### 4. Files and code changes\nnone\n"
        "### 5. Active work and last actions\nThe order was looked up.\n"
        "### 6. Unresolved issues and pending tasks\nnone\n### 7. Immediate next step\nAsk for the bank account.",
        "I want a refund for order 4711, please. ",
    ),
    Good(
        "prune", "The first three files were read; only src/parser.py:42 matters, where the comma is eaten.", _ENGLISH
    ),
    # German
    Good(
        "summary",
        "### Original task\nsrc/parser.py nach Rust portieren, CI-Dateien nicht anfassen.\n### Completed work\n"
        "| File or component | Action | Description |\n|---|---|---|\n| src/lexer.rs | angelegt | 31 Tests grün |\n"
        "### Current state\nZwei Tests schlagen fehl.\n### Pending\n- [ ] Komma am Ende",
        _GERMAN,
    ),
    # French
    Good(
        "summary",
        "### Original task\nPorter src/parser.py en Rust sans toucher à la CI.\n### Completed work\n"
        "| Fichier | Action | Description |\n|---|---|---|\n| src/lexer.rs | créé | 31 tests verts |\n"
        "### Current state\nDeux tests échouent.\n### Pending\n- [ ] virgule finale",
        _FRENCH,
    ),
    # Russian
    Good("summary", "src/parser.rs src/lexer.rs src/driver.rs Cargo.toml tests/nested.rs — готовы", _RUSSIAN),
    # Chinese
    Good(
        "summary",
        "### Original task\n把 src/parser.py 移植到 Rust，不修改 CI 文件。\n### Completed work\n"
        "| 文件 | 操作 | 说明 |\n|---|---|---|\n| src/lexer.rs | 新建 | 31 个测试通过 |\n"
        "### Current state\n两个测试失败。\n### Pending\n- [ ] 末尾的逗号",
        _CHINESE,
    ),
    Good("prune", "读了三个文件；只有 src/parser.py:42 还重要。", _CHINESE),
    Good("summary", "- 词法分析器：完成\n- 解析器：完成\n- 驱动：未完成\n- 文档：未完成", _CHINESE),
]
