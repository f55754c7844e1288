"""A vocabulary out of the tokenizer.json that an operator has named; read once per process, in this process."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from litellm_compaction.errors import CompactionError
from litellm_compaction.tokenizers.encoders import by_tokenizers, is_foreign_failure
from litellm_compaction.tokenizers.vocabulary import CONTROL, Vocabulary

# Gemma's file is the largest known, 33 MB.
_MAX_BYTES = 128 * 2**20


def read_tokenizer_json(path: Path) -> Vocabulary:
    """The vocabulary of a file, or of the tokenizer.json in a folder: 1 to 3 s and about 100 MB.

    Which of its tokens begin and end a prompt stands elsewhere, so that these few are not counted.

    Raises:
        CompactionError: it is absent, no ordinary file, larger than 128 MiB, or no tokenizer.json.
    """
    tokenizer = _read(path / "tokenizer.json" if path.is_dir() else path)
    # Padding would make 4 TB of a word, and a cut would hide the rest of a text.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    special = {token.content: CONTROL for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    return Vocabulary(by_tokenizers(tokenizer), special)


def _read(path: Path) -> Tokenizer:
    try:
        # A pipe would be waited for, a device has no end.
        raw = path.read_bytes() if path.is_file() and path.stat().st_size <= _MAX_BYTES else None
    except OSError as error:
        raise CompactionError(f"{path} cannot be read ({type(error).__name__}).") from error
    if raw is None:
        raise CompactionError(f"{path} cannot be read: it is no ordinary file of at most {_MAX_BYTES >> 20} MiB.")
    try:
        return Tokenizer.from_buffer(raw)
    except BaseException as error:
        if not is_foreign_failure(error):
            raise
        raise CompactionError(f"{path} is no tokenizer.json ({str(error)[:200]}).") from error
