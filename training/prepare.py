"""Collect permissively licensed documentation, train the tokenizer, write the training tokens and the held-out text.

python training/prepare.py --output out/data
python training/prepare.py --output out/data --tokenizer src/replayssm/models/docs_gdn    # for that model's own head
"""

import argparse
import json
import lzma
import re
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import ByteLevel

from texts import SEPARATOR, fraction, read_text, unique_blocks

HERE = Path(__file__).parent
VOCABULARY = 4096


def download(source: dict, scratch: Path) -> tuple[Path, str]:
    """Fetch and unpack one package; return its folder and version."""
    package = source["package"]
    folder = scratch / re.sub(r"[^\w.+-]", "_", package)
    if source["kind"] == "deb":
        archives = list(scratch.glob(f"{package}_*.deb"))
        if not archives:
            subprocess.run(["apt-get", "download", "-q", package], cwd=scratch, check=True, capture_output=True)
            archives = list(scratch.glob(f"{package}_*.deb"))
        version = archives[0].name.split("_")[1].replace("%3a", ":")
        if not folder.exists():
            subprocess.run(["dpkg", "-x", archives[0], folder], check=True)
        return folder, version
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder]
        subprocess.run([*command, package], check=True, capture_output=True)
        for wheel in folder.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)
    return folder, package.split("==")[1]


def collect(source: dict, folder: Path, pool: ProcessPoolExecutor) -> list[tuple[str, str]]:
    """Read all documents of a source as (name, text), in the order of their names."""
    exclude = re.compile("|".join(source.get("exclude", [])) or r"\Z(?!)")
    paths = {str(p.relative_to(folder)): p for p in folder.glob(source["include"]) if p.is_file()}
    names = sorted(n for n in paths if not exclude.search("/" + n))
    texts = pool.map(read_text, [paths[n] for n in names], chunksize=32)
    return [(n, t) for n, t in zip(names, texts, strict=True) if t]


def split(source: dict, documents: list[tuple[str, str]]) -> tuple[list, list]:
    """Split documents into training and held-out ones by the hash of their names."""
    total = sum(len(t.encode()) for _, t in documents)
    # A third more than asked for, since paragraphs that also occur in the training part are dropped afterwards
    share = min(1.35 * source.get("heldout", 0) / max(total, 1), 0.2)
    held = [d for d in documents if fraction(f"{source['name']}/{d[0]}") < share]
    return [d for d in documents if fraction(f"{source['name']}/{d[0]}") >= share], held


def train_tokenizer(texts: list[str], path: Path, vocabulary: int = VOCABULARY) -> Tokenizer:
    """Train a byte-level BPE tokenizer and save it in the Hugging Face format."""
    tokenizer = Tokenizer(models.BPE())
    # Line breaks take the indentation after them, digits stay single, a word takes one space before it
    pieces = Regex(r"\n+[ \t]*| ?[^\W\d]+| ?\d| ?[^\s\w]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SEPARATOR,
        "eos_token": SEPARATOR,
        "pad_token": SEPARATOR,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return tokenizer


def take_tokenizer(model: Path, path: Path) -> Tokenizer:
    """Copy the tokenizer of a trained model, for what is trained on top of it."""
    path.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, path / name)
    return Tokenizer.from_file(str(path / "tokenizer.json"))


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Encode documents to one array, each preceded by the separator."""
    separator = tokenizer.token_to_id(SEPARATOR)
    parts = []
    for start in range(0, len(texts), 1000):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + 1000]):
            parts.append(np.array([separator, *encoding.ids], dtype=np.uint16))
    return np.concatenate(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/data"))
    parser.add_argument("--scratch", type=Path, default=Path("out/packages"))
    parser.add_argument("--sources", type=Path, default=HERE / "sources.json")
    parser.add_argument("--heldout", type=Path, help="where the held-out text goes (default: OUTPUT/heldout)")
    parser.add_argument("--tokenizer", type=Path, help="encode with the tokenizer of this model folder, train none")
    parser.add_argument("--record", action="store_true", help="write versions and sizes back to the sources file")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    heldout = options.heldout or options.output / "heldout"
    for folder in (options.output, options.scratch, heldout):
        folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()

    sources = json.loads(options.sources.read_text())
    train: list[str] = []
    held: list[tuple[dict, list]] = []
    seen: set[bytes] = set()
    with ProcessPoolExecutor(options.workers) as pool:
        for source in sources:
            folder, source["version"] = download(source, options.scratch)
            kept, aside = split(source, collect(source, folder, pool))
            texts = [t for _, t in unique_blocks(kept, seen)]
            train += texts
            held.append((source, aside))
            source["documents"], source["bytes"] = len(texts), sum(len(t.encode()) for t in texts)
            print(f"{time.monotonic() - begin:6.1f} s  {source['name']:18} {source['bytes'] / 1e6:7.2f} MB", flush=True)

    index = []
    for source, aside in held:
        # After all training text: what occurs there is not held out
        texts = [t for _, t in unique_blocks(aside, seen)]
        if texts:
            path = heldout / f"{source['name']}.txt"
            path.write_text(f"\n{SEPARATOR}\n".join(texts), encoding="utf-8")
            keys = ("name", "package", "version", "licence", "copyright")
            index.append({"file": path.name} | {k: source[k] for k in keys})
            index[-1] |= {"documents": len(texts), "bytes": sum(len(t.encode()) for t in texts)}
    (heldout / "index.json").write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n")
    if options.record:
        options.sources.write_text(json.dumps(sources, indent=2, ensure_ascii=False) + "\n")

    # Neighbouring documents resemble each other; a fixed shuffle makes every stretch of tokens a mixture
    order = np.random.default_rng(0).permutation(len(train))
    train = [train[i] for i in order]
    folder = options.output / "tokenizer"
    tokenizer = train_tokenizer(train, folder) if not options.tokenizer else take_tokenizer(options.tokenizer, folder)
    print(f"{time.monotonic() - begin:6.1f} s  tokenizer", flush=True)
    tokens = encode(tokenizer, train)
    size = sum(len(t.encode()) for t in train)
    with lzma.open(options.output / "train.u16.xz", "wb", preset=6) as file:
        file.write(tokens.tobytes())
    summary = {"documents": len(train), "bytes": size, "tokens": len(tokens), "bytes_per_token": size / len(tokens)}
    (options.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"{time.monotonic() - begin:6.1f} s  {summary}  held out {[(i['name'], i['bytes']) for i in index]}")


if __name__ == "__main__":
    main()
