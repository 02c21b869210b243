"""Conversion of a folder of text to records: a byte-level BPE, and samples of `context + 1` tokens.

A data set is a folder named by a digest of all its inputs. It holds `train.ffr` and `val.ffr`
(FFRecord, uint16 tokens, little-endian), `tokenizer.json` for BPE, and `meta.json`. It is built
under a temporary name and then renamed, so it is never partial. A later run with the same inputs
finds the data set by its digest.
"""

import hashlib
import os
import random
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fireflyer.errors import ConfigError, StorageError
from fireflyer.ffrecord import FileWriter

Tokens = npt.NDArray[np.uint16]
Report = Callable[[str, int, int], None]
"""Progress callback (stage, done, total) for building a data set."""

SEPARATOR = "<|file|>"
"""Token 0 of the BPE, placed between two files; raw bytes use byte 0."""
TEXT_LIMIT = 64 << 20
"""Maximum number of bytes of text to use; a larger text is reduced to a seeded choice of whole
files."""
BPE_TEXT = 16 << 20
"""Maximum number of bytes of text for training the BPE."""
MINIMUM_SAMPLES = 64
_FORMAT = 2
_SKIPPED = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "node_modules"}
)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a data set other than its text."""

    tokens: Literal["bpe", "bytes"] = "bpe"
    vocabulary: int = 1024
    """Number of BPE entries; raw bytes always have 256."""
    context: int = 128
    """Number of tokens that a sample predicts."""
    seed: int = 0
    """Seed for the order of the files."""


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `meta.json`."""

    tokens: Literal["bpe", "bytes"]
    vocabulary: int
    context: int
    train_samples: int
    val_samples: int
    files: int
    text_bytes: int
    source: str
    digest: str
    """SHA-256 of the settings and of every file's name and content."""
    sums: dict[str, str]
    """SHA-256 of every other file of the data set."""


class Text(msgspec.Struct, frozen=True):
    """Readable files in the order in which they are packed."""

    source: Path
    files: list[tuple[str, bytes]]
    """Pairs (path relative to the source, content)."""
    left_out: int
    """Number of files left out because of TEXT_LIMIT."""

    @property
    def size(self) -> int:
        return sum(len(content) for _, content in self.files)


def read_text(folder: Path | None, seed: int = 0) -> Text:
    """Reads every UTF-8 text file under `folder`; for None, the Python sources of the standard
    library.

    Raises:
        ConfigError: the folder is missing or holds no readable text.
    """
    source = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder.absolute()
    if not source.is_dir():
        raise ConfigError(f"--text: {source} is not a folder; name one that holds text files")
    paths = sorted(_candidates(source, only_python=folder is None))
    random.Random(seed).shuffle(paths)
    files: list[tuple[str, bytes]] = []
    total = left_out = 0
    for path in paths:
        if total + _size(path) > TEXT_LIMIT:
            left_out += 1
        elif (content := _utf8(path)) is not None:
            files.append((path.relative_to(source).as_posix(), content))
            total += len(content)
    if not files:
        seen = f"none of its {len(paths)} files is UTF-8 text" if paths else "it holds no file"
        raise ConfigError(f"--text: nothing to train on in {source}: {seen}; name another folder")
    return Text(source, files, left_out)


def _candidates(source: Path, only_python: bool) -> Iterator[Path]:
    for root, folders, names in os.walk(source):
        folders[:] = [
            f for f in folders if not f.startswith(".") and not (only_python and f in _SKIPPED)
        ]
        for name in names:
            if not name.startswith(".") and (name.endswith(".py") or not only_python):
                yield Path(root, name)


def _size(path: Path) -> int:
    """Returns the size in bytes of a regular file; 0 for anything else."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def _utf8(path: Path) -> bytes | None:
    """Returns the content of a regular, readable, non-empty UTF-8 file without NUL bytes, else
    None."""
    try:
        if not path.is_file():
            return None
        content = path.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return None
    return content if content.strip() and b"\0" not in content else None


def digest(text: Text, settings: Settings) -> str:
    """Returns the SHA-256 over the settings and the text."""
    whole = hashlib.sha256(msgspec.json.encode((_FORMAT, settings)))
    for name, content in text.files:
        whole.update(f"\0{name}\0{len(content)}\0".encode())
        whole.update(content)
    return whole.hexdigest()


def find(directory: Path, wanted: str) -> Path | None:
    """Returns the data set with this digest under `directory`; None if it is absent or damaged."""
    folder = directory / wanted[:16]
    try:
        meta = load_meta(folder)
        whole = all(_sum(folder / name) == good for name, good in meta.sums.items())
    except (OSError, ConfigError):
        return None
    return folder if whole and meta.digest == wanted else None


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_meta(folder: Path) -> Meta:
    """Reads `meta.json`.

    Raises:
        ConfigError: the file is missing or `prepare` did not write it.
    """
    try:
        return msgspec.json.decode((folder / "meta.json").read_bytes(), type=Meta)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{folder} is not a data set of the demo: {error}") from error


def prepare(
    text: Text,
    directory: Path,
    settings: Settings,
    report: Report,
    note: Callable[[str], None] = lambda _: None,
) -> Path:
    """Returns the data set of this text and these settings under `directory`; builds it if
    necessary.

    A damaged data set is built again, and `note` reports this.

    Raises:
        ConfigError: the text is too short.
        StorageError: the data set cannot be written.
    """
    wanted = digest(text, settings)
    if (found := find(directory, wanted)) is not None:
        return found
    target = directory / wanted[:16]
    if target.exists():
        note(f"the data set {target} is damaged; building it again")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=directory))
        try:
            _build(text, settings, wanted, building, report)
            shutil.rmtree(target, ignore_errors=True)
            building.rename(target)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
    except OSError as error:
        raise StorageError(
            f"cannot write the data set {target}: {error.strerror}; name another --dir"
        ) from error
    return target


def _build(text: Text, settings: Settings, wanted: str, folder: Path, report: Report) -> None:
    names = ["train.ffr", "val.ffr"]
    if settings.tokens == "bpe":
        report("learning the vocabulary", 0, 0)
        tokenizer = train_bpe((content for _, content in text.files), settings.vocabulary)
        tokenizer.save(str(folder / "tokenizer.json"))
        names.append("tokenizer.json")
        stream = _encode(text, tokenizer, report)
        vocabulary = tokenizer.get_vocab_size()
    else:
        joined = b"\0".join(content for _, content in text.files)
        stream = np.frombuffer(joined, np.uint8).astype(np.uint16)
        vocabulary = 256
    samples = cut(stream, settings.context)
    if len(samples) < MINIMUM_SAMPLES:
        raise ConfigError(
            f"--text: {text.source} gives {len(samples)} samples of {settings.context} tokens; at least "
            f"{MINIMUM_SAMPLES} are needed, about {MINIMUM_SAMPLES * settings.context * 4 >> 10} KiB of text"
        )
    every = max(2, len(samples) // max(8, min(256, len(samples) // 50)))
    held_out = np.arange(len(samples)) % every == every - 1
    _pack(folder / "train.ffr", samples[~held_out], report)
    _pack(folder / "val.ffr", samples[held_out], report)
    meta = Meta(
        tokens=settings.tokens,
        vocabulary=vocabulary,
        context=settings.context,
        train_samples=int((~held_out).sum()),
        val_samples=int(held_out.sum()),
        files=len(text.files),
        text_bytes=text.size,
        source=str(text.source),
        digest=wanted,
        sums={name: _sum(folder / name) for name in names},
    )
    (folder / "meta.json").write_bytes(msgspec.json.format(msgspec.json.encode(meta)) + b"\n")


def train_bpe(contents: Iterable[bytes], vocabulary: int) -> Tokenizer:
    """Trains a byte-level BPE with `vocabulary` entries, of which 256 are single bytes.

    SEPARATOR is entry 0.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(contents, BPE_TEXT), trainer)
    return tokenizer


def _first(contents: Iterable[bytes], limit: int) -> Iterator[str]:
    for content in contents:
        if limit <= 0:
            return
        limit -= len(content)
        yield content.decode()


def _encode(text: Text, tokenizer: Tokenizer, report: Report) -> Tokens:
    """Encodes all files as one stream, each followed by the separator."""
    parts: list[Tokens] = []
    contents = [content.decode() for _, content in text.files]
    for start in range(0, len(contents), 16):
        report("turning text into tokens", start, len(contents))
        batch = tokenizer.encode_batch(contents[start : start + 16], add_special_tokens=False)
        parts.extend(np.array([*encoding.ids, 0], np.uint16) for encoding in batch)
    report("turning text into tokens", len(contents), len(contents))
    return np.concatenate(parts)


def cut(stream: Tokens, context: int) -> Tokens:
    """Cuts a stream [tokens] into samples [n, context + 1].

    The last token of a sample is also the first of the next sample.
    """
    count = max(0, len(stream) - 1) // context
    starts = np.arange(count)[:, None] * context
    samples: Tokens = stream[starts + np.arange(context + 1)]
    return samples


def _pack(path: Path, samples: Tokens, report: Report) -> None:
    with FileWriter(path, len(samples)) as writer:
        for number, sample in enumerate(samples):
            if number % 512 == 0:
                report("packing records", number, len(samples))
            writer.write_one(sample.astype("<u2").tobytes())
    report("packing records", len(samples), len(samples))
