"""`replayssm generate --batch-file`: many prompts through one engine, one line of output each, and where it stopped it
goes on.

What is finished is a line that is on the disk: a line is appended and synced when its request ends. A later run reads
these lines, drops a last one that was cut off, and computes what is missing. Each line carries a digest of what was
asked, so that answers to another question are never taken for these.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel, ConfigDict, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from replayssm import ReplayError, models
from replayssm.engine import Engine, Params, Request

from .common import UserError, print_json
from .setting import Setting

Number = StrictInt | StrictFloat
# Errors of so many requests are shown; all are in the output.
SHOWN = 5
# What every line of the output starts with.
BEGINNING = b'{"id": '


class Line(BaseModel):
    """One line of the batch file. What a line leaves out is as the command's options say."""

    model_config = ConfigDict(extra="forbid")

    prompt: StrictStr | list[StrictInt]
    id: StrictStr | StrictInt | None = None
    max_new_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    seed: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stop_tokens: list[StrictInt] | None = None
    ignore_eos: StrictBool | None = None
    n: StrictInt | None = None

    def params(self, defaults: Params) -> Params:
        """What the engine takes."""
        given = self.model_dump(exclude={"prompt", "id"}, exclude_none=True)
        if "max_new_tokens" in given:
            given["max_tokens"] = given.pop("max_new_tokens")
        return replace(defaults, **given)


@dataclass(frozen=True)
class Job:
    """One request of the batch file.

    Attributes:
        id: as given; the line's number otherwise.
        prompt: text or token ids.
        params: with a seed of its own, the same in every run.
        digest: of all that decides the answer.
    """

    id: str | int
    prompt: str | list[int]
    params: Params
    digest: str


@dataclass
class Tally:
    """What a run did.

    Attributes:
        earlier: requests that were in the output already.
        done: requests that this run finished, failed ones included.
        failed: requests with an error, those of earlier runs included.
        tokens: new ones of this run.
        prompt_tokens: of this run's prompts.
    """

    earlier: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0
    prompt_tokens: int = 0


def command(
    setting: Setting,
    source: Path,
    output: Path | None,
    defaults: Params,
    seed: int,
    capacity: dict[str, int | None],
    as_json: bool,
) -> None:
    """Answer a batch file.

    Args:
        setting: the model and how it decodes.
        source: the batch file.
        output: where the answers go.
        defaults: for what a line leaves out.
        seed: lines without one draw from this and what they ask.
        capacity: slots, memory and max_length of the engine.
        as_json: print the summary as a JSON document.
    """
    if output is None:
        raise UserError("--batch-file needs --output")
    if output.resolve() == source.resolve():
        raise UserError("--output is the batch file itself")
    digest = hashlib.sha256((models.resolve(setting.model) / "config.json").read_bytes()).hexdigest()
    decides = {"model": digest, "dtype": setting.dtype, "precision": setting.precision, "seed": seed}
    jobs = read_jobs(source, defaults, decides | {"max_length": capacity["max_length"]})
    results = Results(output, jobs)
    try:
        target, tokenizer = setting.load()
        with setting.engine(target, tokenizer, **capacity) as engine, progress(jobs, results) as tick:
            begin = time.perf_counter()
            tally = run(engine, jobs, results, tick)
            summary = report(tally, engine, time.perf_counter() - begin)
    except KeyboardInterrupt:
        print(f"interrupted: {output} has what is finished; the same command goes on from there", file=sys.stderr)
        raise typer.Exit(code=130) from None
    finally:
        results.close()
    summary = {"batch_file": str(source), "output": str(output), "model": setting.model} | summary
    if as_json:
        print_json(summary)
    else:
        show(summary, output)
    if summary["failed"]:
        raise typer.Exit(code=1)


def read_jobs(path: Path, defaults: Params, setting: dict[str, Any]) -> list[Job]:
    """The requests of a batch file, all of them checked before anything runs.

    Args:
        path: JSON lines; empty lines are skipped.
        defaults: for what a line leaves out.
        setting: what else decides the answers, such as the model.

    Raises:
        UserError: a line is no such object, or two have the same id; the message has the line's number.
    """
    jobs: dict[str | int, tuple[int, Job]] = {}
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = Line.model_validate_json(text)
            params = line.params(defaults)
        except ValidationError as error:
            raise UserError(f"{path}:{number}: {_first(error)}") from None
        except ReplayError as error:
            raise UserError(f"{path}:{number}: {error}") from None
        job = _job(number if line.id is None else line.id, line.prompt, params, setting)
        if job.id in jobs:
            raise UserError(f"{path}:{number}: id {job.id!r} is that of line {jobs[job.id][0]}, too")
        jobs[job.id] = number, job
    if not jobs:
        raise UserError(f"{path}: holds no prompts")
    return [job for _, job in jobs.values()]


def _job(name: str | int, prompt: str | list[int], params: Params, setting: dict[str, Any]) -> Job:
    asked = {"id": name, "prompt": prompt, "params": vars(params), "setting": setting}
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    # A seed that depends on nothing but what was asked: a run that goes on draws what an uninterrupted one does.
    return Job(name, prompt, params if params.seed is not None else replace(params, seed=int(digest, 16) >> 1), digest)


def _first(error: ValidationError) -> str:
    found = error.errors()[0]
    place = ".".join(str(part) for part in found["loc"] if part not in ("str", "int", "float") and "[" not in str(part))
    if found["type"] == "extra_forbidden":
        return f"unknown field {place!r}; expected {', '.join(Line.model_fields)}"
    return f"{place}: {found['msg']}" if place else found["msg"]


class Results:
    """The output file while one process writes it.

    Attributes:
        done: digests and errors of the lines that are there, by id.
    """

    def __init__(self, path: Path, jobs: list[Job]) -> None:
        """Open or create the file, drop a last line that was cut off, and compare the others with the requests.

        Raises:
            UserError: another process writes the file, or a line is no answer to any of these requests.
        """
        if path.is_dir():
            raise UserError(f"{path}: is a folder")
        self.path = path
        self._file = path.open("a+b")
        try:
            self._lock()
            self._file.seek(0)
            *lines, rest = self._file.read().split(b"\n")
            self.done = self._read(lines, {job.id: job for job in jobs})
            if not (rest.startswith(BEGINNING) or BEGINNING.startswith(rest)):
                raise self._foreign(len(lines) + 1)
            self._file.truncate(sum(len(line) + 1 for line in lines))
        except BaseException:
            self._file.close()
            raise

    def append(self, record: dict[str, Any]) -> None:
        """Write a line; when this returns it is on the disk."""
        self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file and let others write it; one without a line goes away."""
        if not os.fstat(self._file.fileno()).st_size:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def _lock(self) -> None:
        try:
            import fcntl
        except ModuleNotFoundError:  # no POSIX: nothing keeps two runs apart
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.path}: another run is writing it") from None

    def _foreign(self, number: int) -> UserError:
        return UserError(f"{self.path}:{number}: is no line of this command; choose another --output")

    def _read(self, lines: list[bytes], jobs: dict[str | int, Job]) -> dict[str | int, str | None]:
        done: dict[str | int, str | None] = {}
        for number, text in enumerate(lines, 1):
            where = f"{self.path}:{number}"
            try:
                record = json.loads(text)
                name, digest, error = record["id"], record["request"], record.get("error")
                hash(name)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise self._foreign(number) from None
            if name not in jobs:
                raise UserError(f"{where}: id {name!r} is not in the batch file; choose another --output")
            if digest != jobs[name].digest:
                raise UserError(
                    f"{where}: id {name!r} answers another prompt, or other options or another model; choose another "
                    "--output"
                )
            if name in done:
                raise UserError(f"{where}: id {name!r} comes twice")
            done[name] = error
        return done


def run(engine: Engine, jobs: list[Job], results: Results, tick: Any = lambda tally: None) -> Tally:
    """Answer what is not answered yet.

    Args:
        engine: with the model's tokenizer.
        jobs: in the order of the file, which is that of admission.
        results: where the answers go, in the order in which they end.
        tick: called with the tally after each step.
    """
    tally = Tally(earlier=len(results.done), failed=sum(error is not None for error in results.done.values()))
    waiting = deque(job for job in jobs if job.id not in results.done)
    running: list[tuple[Job, Request]] = []

    def finish(job: Job, record: dict[str, Any]) -> None:
        results.append({"id": job.id, "request": job.digest, **record})
        tally.done += 1
        tally.failed += "error" in record
        tally.prompt_tokens += record["prompt_tokens"]
        tally.tokens += sum(sample["tokens"] for sample in record.get("samples", [record]))

    while waiting or running:
        # As many at hand as slots, so that none stays empty; the rest waits here as text.
        while waiting and len(running) < 2 * engine.runner.slots:
            job = waiting.popleft()
            try:
                running.append((job, engine.submit(job.prompt, job.params)))
            except ReplayError as error:
                finish(job, {"text": "", "tokens": 0, "prompt_tokens": 0, "finish": "error", "error": str(error)})
        try:
            engine.step()
        except Exception:
            # The engine has failed the requests that ran, with the reason, and goes on with the others.
            if not any(request.finished for _, request in running):
                raise
        for job, request in running:
            if request.finished:
                finish(job, _record(request))
        running = [(job, request) for job, request in running if not request.finished]
        tick(tally)
    return tally


def _record(request: Request) -> dict[str, Any]:
    """What the output says of a request."""
    samples = [{"text": s.text, "tokens": len(s.tokens), "finish": s.finish} for s in request.samples]
    record: dict[str, Any] = {**samples[0], "prompt_tokens": len(request.prompt)}
    if len(samples) > 1:
        record["samples"] = samples
    if request.error is not None:
        record["error"] = request.error
    return record


@contextmanager
def progress(jobs: list[Job], results: Results) -> Iterator[Any]:
    """A bar on a terminal's stderr; gives the ``tick`` of ``run``."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(jobs), completed=len(results.done), note="")
        begin = time.perf_counter()

        def tick(tally: Tally) -> None:
            speed = tally.tokens / (time.perf_counter() - begin)
            note = f"{speed:.0f} tokens/s" + (f", {tally.failed} failed" if tally.failed else "")
            bar.update(task, completed=tally.earlier + tally.done, note=note)

        yield tick


def report(tally: Tally, engine: Engine, seconds: float) -> dict[str, Any]:
    """The summary in plain values."""
    counters = engine.counters
    return {
        "requests": tally.earlier + tally.done,
        "earlier": tally.earlier,
        "failed": tally.failed,
        "prompt_tokens": tally.prompt_tokens,
        "tokens": tally.tokens,
        "seconds": seconds,
        "tokens_per_second": tally.tokens / seconds,
        "slots": engine.runner.slots,
        "forwards": counters.forwards,
        "drafts": {"proposed": counters.drafted, "accepted": counters.accepted},
    }


def show(summary: dict[str, Any], output: Path) -> None:
    """The summary for people: one line on stdout; the first errors on stderr."""
    failed = f", {summary['failed']} failed" if summary["failed"] else ""
    earlier = f" ({summary['earlier']} of them earlier)" if summary["earlier"] else ""
    print(
        f"{output}: {summary['requests']} requests{earlier}{failed}; {summary['tokens']:,} tokens in "
        f"{summary['seconds']:.1f} s, {summary['tokens_per_second']:.1f} tokens/s"
    )
    if not failed:
        return
    records = (json.loads(line) for line in output.read_bytes().splitlines())
    wrong = [record for record in records if "error" in record]
    for record in wrong[:SHOWN]:
        print(f"id {record['id']!r}: {record['error']}", file=sys.stderr)
    if len(wrong) > SHOWN:
        print(f"… and {len(wrong) - SHOWN} more", file=sys.stderr)
