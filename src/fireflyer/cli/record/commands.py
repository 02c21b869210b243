"""Verbs and options of `fireflyer record`. Implementations are imported when a verb runs."""

import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from fireflyer.cli.options import JsonOption

record = typer.Typer(
    name="record",
    no_args_is_help=False,
    rich_markup_mode=None,
    help="""Make, look into, check and convert record files.

\b
  fireflyer record pack photos/ -o photos.ffr
  fireflyer record ls photos.ffr --html photos.html
  fireflyer record verify photos.ffr
""",
)

Files = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE", help="Record files, or folders of them; or URLs (fs3:///a.ffr)."
    ),
]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="PATH", help="Output file or folder.")]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace existing output.")]
FilesCount = Annotated[
    int | None, typer.Option("--files", min=1, help="Number of files to write in the folder PATH.")
]
FileSize = Annotated[
    str | None,
    typer.Option(
        "--file-size",
        metavar="SIZE",
        help="Write files of about SIZE, e.g. 256M, in the folder PATH.",
    ),
]
Columns = Annotated[
    str | None, typer.Option("--columns", metavar="A,B", help="Only these columns.")
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="KIND",
        help="folder, tar, parquet, huggingface, mds, text, jsonl, numpy, torch, records; default: by name.",
    ),
]
Format = Annotated[
    str,
    typer.Option(
        "--format", metavar="auto|v1|v2", help="auto: v1 for plain bytes, v2 for typed columns."
    ),
]
Compression = Annotated[
    str | None, typer.Option("--compression", metavar="zstd", help="Compress samples; implies v2.")
]
Nan = Annotated[
    str | None,
    typer.Option(
        "--nan",
        metavar="NaN|null",
        help="Write NaN and infinity in JSON as NaN and Infinity (default), or as null.",
    ),
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, max=64, help="Threads that read ahead.")]


@record.callback()
def prepare(context: typer.Context) -> None:
    _unwind_on_sigterm(context)


def _unwind_on_sigterm(context: typer.Context) -> None:
    """Makes SIGTERM raise like Ctrl-C until the verb ends, so that no partial file stays."""
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL:
        return  # SIGTERM has another handler, or is ignored

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # cleanup must not be interrupted
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    context.call_on_close(lambda: signal.signal(signal.SIGTERM, before))


@record.command()
def pack(
    source: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE", help="Files, a folder, or MODULE:NAME of a data set."),
    ],
    out: Out,
    kind: From = None,
    columns: Columns = None,
    files: FilesCount = None,
    file_size: FileSize = None,
    version: Format = "auto",
    compression: Compression = None,
    jobs: Jobs = 4,
    force: Force = False,
    json: JsonOption = False,
) -> None:
    """Pack other formats into record files.

    \b
      fireflyer record pack photos/ -o photos.ffr
      fireflyer record pack shard-*.tar -o data/ --file-size 256M
      fireflyer record pack table.parquet -o table.ffr --columns image,label
      fireflyer record pack my_data:TrainSet -o train/ --files 8

    A folder of class folders becomes rows {image or data, label, class, name}. With --format v1 a
    folder becomes a packed folder instead: the bytes of its files and the tree of their names.
    """
    from fireflyer.cli.record import impl

    impl.pack(
        source, out, kind=kind, columns=columns, files=files, file_size=file_size,
        form=impl.form_of(version, compression), jobs=jobs, force=force, json=json,
    )  # fmt: skip


@record.command()
def ls(
    files: Files,
    json: JsonOption = False,
    html: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write an HTML page with samples.")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Samples on that page.")] = 60,
    force: Force = False,
) -> None:
    """List record files: samples, sizes, columns, lengths.

    \b
      fireflyer record ls data/
      fireflyer record ls photos.ffr --html photos.html
    """
    from fireflyer.cli.record import impl

    impl.ls(files, json=json, html=html, samples=samples, force=force)


@record.command()
def cat(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Record file, or a folder; or a URL.")
    ],
    index: Annotated[list[int], typer.Argument(metavar="I", help="Samples, from 0.")],
    form: Annotated[
        str,
        typer.Option(
            "--as", metavar="raw|text|json|hex", help="Default: json for rows, raw for bytes."
        ),
    ] = "",
    column: Annotated[str | None, typer.Option(metavar="NAME", help="Only this column.")] = None,
    nan: Nan = None,
) -> None:
    """Print samples.

    \b
      fireflyer record cat photos.ffr 7 > seven.jpg
      fireflyer record cat train/ 0 1 2 --as json
    """
    from fireflyer.cli.record import impl

    impl.cat(file, index, form=form, column=column, nan=nan)


@record.command()
def verify(
    files: Files,
    metadata_only: Annotated[
        bool, typer.Option("--metadata-only", help="Check only headers and indices.")
    ] = False,
    most: Annotated[int, typer.Option(min=1, help="Maximum number of damages to list.")] = 10,
    json: JsonOption = False,
) -> None:
    """Check every sample against its checksum.

    Exit 1 if anything is damaged; the first damages are listed.

    \b
      fireflyer record verify data/
    """
    from fireflyer.cli.record import impl

    raise typer.Exit(impl.verify(files, data=not metadata_only, most=most, json=json))


@record.command()
def merge(
    files: Files,
    out: Out,
    compression: Compression = None,
    force: Force = False,
    json: JsonOption = False,
) -> None:
    """Concatenate record files into one file.

    \b
      fireflyer record merge part-*.ffr -o all.ffr
    """
    from fireflyer.cli.record import impl

    impl.merge(files, out, compression=compression, force=force, json=json)


@record.command()
def split(
    files: Files,
    out: Out,
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="Samples in each file.")
    ] = None,
    parts: FilesCount = None,
    file_size: FileSize = None,
    fractions: Annotated[
        str | None, typer.Option(metavar="0.8,0.1,0.1", help="Write one file for each fraction.")
    ] = None,
    names: Annotated[
        str | None, typer.Option(metavar="A,B", help="Names of the files of --fractions.")
    ] = None,
    shuffle: Annotated[
        int | None,
        typer.Option(metavar="SEED", min=0, help="Seed of the shuffle before --fractions."),
    ] = None,
    compression: Compression = None,
    force: Force = False,
    json: JsonOption = False,
) -> None:
    """Split record files by count, by size, or by fractions.

    \b
      fireflyer record split all.ffr -o parts/ --file-size 256M
      fireflyer record split all.ffr -o sets/ --fractions 0.9,0.1 --names train,val --shuffle 0
    """
    from fireflyer.cli.record import impl

    impl.split(
        files, out, count=count, parts=parts, file_size=file_size, fractions=fractions, names=names,
        shuffle=shuffle, compression=compression, force=force, json=json,
    )  # fmt: skip


@record.command()
def convert(
    source: Annotated[
        list[str], typer.Argument(metavar="SOURCE", help="Record files, or another format.")
    ],
    out: Out,
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="KIND", help="ffr, tar, jsonl, parquet or npy; else by PATH's suffix."
        ),
    ] = "",
    kind: From = None,
    columns: Columns = None,
    version: Format = "auto",
    compression: Compression = None,
    nan: Nan = None,
    jobs: Jobs = 4,
    force: Force = False,
    json: JsonOption = False,
) -> None:
    """Convert record files to tar, JSON lines, Parquet or arrays, or to another version.

    \b
      fireflyer record convert photos.ffr -o photos.tar
      fireflyer record convert table.ffr -o arrays/ --to npy --columns x,y
    """
    from fireflyer.cli.record import impl

    impl.convert(
        source, out, to=to, kind=kind, columns=columns,
        form=impl.form_of(version, compression), nan=nan, jobs=jobs, force=force, json=json,
    )  # fmt: skip
