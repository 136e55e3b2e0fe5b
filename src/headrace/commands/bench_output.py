"""The five formats of `headrace bench`: a function that takes rows as they come, and None at the end."""

import csv
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
Emit = Callable[[Row | None], None]


def printer(name: str, varied: Sequence[str]) -> Emit:
    """`varied` names the Config fields that deserve a column in the table."""
    return {"md": lambda: markdown(varied), "csv": comma, "json": array, "jsonl": by_line, "sql": sql}[name]()


def markdown(varied: Sequence[str]) -> Emit:
    """llama-bench's table; the link's columns appear when something crossed it."""
    columns: list[tuple[str, int, Callable[[Row], str]]] = [
        ("model", 30, lambda r: r["model_type"]),
        ("size", 10, lambda r: size_text(r["model_size"])),
        ("params", 10, lambda r: f"{r['model_n_params'] / 1e9:.2f} B"),
        ("backend", 10, lambda r: r["backend"]),
        ("threads", 7, lambda r: str(r["n_threads"])),
    ]
    columns += [(name, max(len(name), 6), column(name)) for name in varied if name != "n_threads"]
    columns += [
        ("test", 15, lambda r: r["test"]),
        ("t/s", 20, lambda r: f"{r['avg_ts']:.2f} ± {r['stddev_ts']:.2f}"),
    ]
    link: list[tuple[str, int, Callable[[Row], str]]] = [
        ("moved", 10, lambda r: "" if r["moved_bytes"] is None else size_text(r["moved_bytes"])),
        ("link GB/s", 9, lambda r: number(r["link_gbps"], 1)),
        ("% of bound", 10, lambda r: number(r["bound_percent"])),
        ("overlap %", 9, lambda r: number(r["overlap"], scale=100)),
    ]
    last: Row = {}

    def emit(row: Row | None) -> None:
        if row is None:
            print(f"\nheadrace {last['version']} {last['build_commit']}".rstrip())
            return
        if not last or (row["streamed_bytes"] and columns[-1] is not link[-1]):
            if row["streamed_bytes"]:
                columns.extend(link)
            if last:  # the table goes on with more columns
                print()
            left = {"model", "backend"}
            print("| " + " | ".join(f"{c:<{w}}" if c in left else f"{c:>{w}}" for c, w, _ in columns) + " |")
            print("| " + " | ".join("-" * w if c in left else "-" * (w - 1) + ":" for c, w, _ in columns) + " |")
        last.update(row)
        cells = (f"{text(row):<{w}}" if c in ("model", "backend") else f"{text(row):>{w}}" for c, w, text in columns)
        print("| " + " | ".join(cells) + " |", flush=True)

    return emit


def number(value: float | None, digits: int = 0, scale: float = 1.0) -> str:
    return "" if value is None else f"{scale * value:.{digits}f}"


def column(name: str) -> Callable[[Row], str]:
    return lambda row: str(row[name])


def size_text(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.2f} MiB"


def comma() -> Emit:
    writer: Any = None

    def emit(row: Row | None) -> None:
        nonlocal writer
        if row is None:
            return
        flat = {k: v for k, v in row.items() if not isinstance(v, list)}
        if writer is None:
            writer = csv.DictWriter(sys.stdout, list(flat), quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
            writer.writeheader()
        writer.writerow(flat)
        sys.stdout.flush()

    return emit


def array() -> Emit:
    rows: list[Row] = []

    def emit(row: Row | None) -> None:
        if row is None:
            print(json.dumps(rows, indent=2))
        else:
            rows.append(row)

    return emit


def by_line() -> Emit:
    return lambda row: None if row is None else print(json.dumps(row), flush=True)


def sql() -> Emit:
    """A table `headrace_bench`, then one INSERT a row; sqlite3 reads it."""
    started = False

    def emit(row: Row | None) -> None:
        nonlocal started
        if row is None:
            return
        flat = {k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()}
        if not started:
            started = True
            types = ",\n".join(f"  {k} {'TEXT' if isinstance(v, str) else 'NUMERIC'}" for k, v in flat.items())
            print(f"CREATE TABLE IF NOT EXISTS headrace_bench (\n{types}\n);")
        print(
            f"INSERT INTO headrace_bench ({', '.join(flat)}) VALUES ({', '.join(map(literal, flat.values()))});",
            flush=True,
        )

    return emit


def literal(value: Any) -> str:
    if value is None:
        return "NULL"
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)
