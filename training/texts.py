"""Turn documentation pages and source files into plain text, and drop what occurs twice."""

import gzip
import hashlib
import html
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

SEPARATOR = "<|endoftext|>"
MIN_DOCUMENT = 300  # characters; shorter pages are redirects and stubs
MIN_BLOCK = 64  # characters; a shorter paragraph may occur in many documents (headings, `Returns`)
MAX_FILE = 4_000_000  # bytes of markup; larger pages are indexes or whole books that exist page by page too

_STARTS = [
    re.compile(p)
    for p in (
        r'<section id="main-content"',
        r'<[a-z]+ [^>]*role="main"',
        r"<main\b",
        r'<div id="content"',
        r'<div class="sect1"',
        r"<article\b",
        r"<body\b",
    )
]
_ENDS = re.compile(r'<div class="(?:sphinxsidebar|navfooter|spirit-nav-bottom)"|<footer\b|</main>|</body>')
_DROPPED = re.compile(
    r"<(script|style|nav|svg|button|select|template)\b.*?</\1>|<!--.*?-->"
    r'|<a\b[^>]*class="(?:headerlink|srclink|anchor|mark|viewcode-link|reference internal image-reference|test-arrow'
    r')"[^>]*>.*?</a>'
    r'|<a\b[^>]*id="toggle-all-docs".*?</a>|<summary class="hideme">.*?</summary>'
    r'|<div class="(?:spirit-nav|navheader|navfooter|toc|sidebar)[^"]*">.*?</div>',
    re.S | re.I,
)
_TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9]*)[^>]*>|<[!?][^>]*>")
_BLOCK = frozenset(
    ["p", "div", "section", "table", "ul", "ol", "dl", "tr", "pre", "blockquote", "details", "summary", "hr"]
    + [f"h{level}" for level in range(1, 7)]
)
_LINE = frozenset(["br", "li", "dt", "dd", "thead", "tbody"])
_SPACES = re.compile(r"[ \t\r\n\f\u00a0\u200b]+")
_TRAILING = re.compile(r"[ \t]+\n")
_DIGIT = re.compile(r"\d")
_GAPS = re.compile(r"\n{3,}")


def html_to_text(page: str) -> str:
    """Return the main part of a page as lightly marked-up plain text (`#` headings, `-` items, backticks)."""
    for start in _STARTS:
        if found := start.search(page):
            page = page[found.start() :]
            break
    if (end := _ENDS.search(page, 200)) is not None:
        page = page[: end.start()]
    page = _DROPPED.sub("", page)
    out: list[str] = []
    pre = position = 0
    for tag in _TAG.finditer(page):
        piece = page[position : tag.start()]
        position = tag.end()
        if piece:
            out.append(piece.replace("\r", "") if pre else _SPACES.sub(" ", piece))
        name = (tag.group(2) or "").lower()
        closing = bool(tag.group(1))
        if name == "pre":
            pre = 0 if closing else 1
            out.append("\n\n")
        elif pre:
            if name == "br":
                out.append("\n")
        elif name == "code":
            out.append("`")
        elif name in _BLOCK:
            out.append("\n\n" if name != "tr" else "\n")
            if name[0] == "h" and name[1:].isdigit() and not closing:
                out.append("#" * int(name[1:]) + " ")
        elif name in _LINE:
            out.append("\n" if name != "li" or closing else "\n- ")
        elif name in ("td", "th") and closing:
            out.append(" ")
    out.append(_SPACES.sub(" ", page[position:]))
    return tidy(html.unescape("".join(out)))


def tidy(text: str) -> str:
    """Normalise line ends, blank lines and non-breaking spaces."""
    text = text.replace("\r\n", "\n").replace("\u00a0", " ").replace("\u200b", "").replace("``", "`")
    text = text.replace(SEPARATOR, "")
    text = _TRAILING.sub("\n", text)
    # outside preformatted text a line starts in column 0; one space is a left-over of the markup
    text = re.sub(r"\n (?=\S)", "\n", text)
    text = re.sub(r"\n-\s*\n+(?=\S)(?!-)", "\n- ", text)
    return _GAPS.sub("\n\n", text).strip() + "\n"


def read_text(path: Path) -> str:
    """Read a page, manual or source file as text; an empty string where it is not worth keeping."""
    if path.is_symlink() or path.stat().st_size > MAX_FILE:
        return ""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    name = path.name.removesuffix(".gz")
    if name.endswith((".html", ".htm")):
        text = html_to_text(text)
    elif re.search(r"\.\d[a-z]*$", name):
        text = manual_to_text(text)
    else:
        text = tidy(text)
    # Stubs, translations and tables of numbers teach nothing about documentation
    foreign = len(text.encode()) > 1.1 * len(text)
    return "" if foreign or len(text) < MIN_DOCUMENT or len(_DIGIT.findall(text)) > 0.2 * len(text) else text


def manual_to_text(page: str) -> str:
    """Strip the troff requests of a manual page."""
    page = re.sub(r'^[.\'](SH|SS)\s+"?(.*?)"?$', r"\n# \2\n", page, flags=re.M)
    page = re.sub(r"^[.'](TP|PP|P|IP|LP|sp|br|nf|fi).*$", "", page, flags=re.M)
    page = re.sub(r'^\.(B|I|BR|BI|IR)\s+"?(.*?)"?$', r"\2", page, flags=re.M)
    page = re.sub(r"^[.'].*$\n?", "", page, flags=re.M)
    page = re.sub(r"\\f(?:\([A-Z]{2}|\[[A-Z]*\]|[A-Z])", "", page)
    return tidy(page.replace("\\-", "-").replace("\\&", "").replace("\\e", "\\").replace("\\*(", ""))


def fraction(name: str) -> float:
    """Return a number in [0, 1) that depends on the document's name only."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64


def unique_blocks(documents: Iterable[tuple[str, str]], seen: set[bytes]) -> Iterator[tuple[str, str]]:
    """Yield the documents without the paragraphs that occurred before; `seen` is filled on the way."""
    for name, text in documents:
        kept = []
        for block in text.split("\n\n"):
            stripped = block.strip()
            if len(stripped) >= MIN_BLOCK:
                key = hashlib.blake2b(stripped.encode(), digest_size=12).digest()
                if key in seen:
                    continue
                seen.add(key)
            kept.append(block)
        text = _GAPS.sub("\n\n", "\n\n".join(kept)).strip() + "\n"
        if len(text) >= MIN_DOCUMENT:
            yield name, text
