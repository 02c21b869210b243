"""pandas, polars, DuckDB and Hugging Face `datasets` write and read `fs3://` URLs.

`python -m tests.fs3.client.reader_runs URL`, by the Python of build/callbacks. FIREFLYER_FS names
the same file system, FIREFLYER_FS_SECRET_FILE the secret.
"""

import sys

import duckdb
import fsspec
import pandas
import polars

import datasets


def through_pandas(url: str) -> None:
    frame = pandas.DataFrame({"step": range(1000), "loss": [1 / (n + 1) for n in range(1000)]})
    for write, read, name in (
        (frame.to_parquet, pandas.read_parquet, "frame.parquet"),
        (frame.to_csv, pandas.read_csv, "frame.csv"),
    ):
        write(f"{url}/{name}", index=False)
        pandas.testing.assert_frame_equal(read(f"{url}/{name}"), frame)


def through_polars(url: str) -> None:
    frame = polars.DataFrame({"key": ["a", "b", "c"] * 100, "value": range(300)})
    with fsspec.open(f"{url}/polars.parquet", "wb") as file:
        frame.write_parquet(file)
    with fsspec.open(f"{url}/polars.parquet", "rb") as file:
        assert polars.read_parquet(file).equals(frame)


def through_duckdb(url: str) -> None:
    connection = duckdb.connect()
    connection.register_filesystem(fsspec.url_to_fs(url)[0])
    connection.execute(f"COPY (SELECT range AS n FROM range(5000)) TO '{url}/n.parquet'")
    found = connection.execute(f"SELECT count(*), sum(n) FROM '{url}/*n.parquet'").fetchone()
    assert found == (5000, 4999 * 5000 // 2), found


def through_datasets(_: str) -> None:
    url = "fs3://"  # `load_dataset` drops the address of a URL
    made = datasets.Dataset.from_dict({"text": [f"line {n}" for n in range(200)]})
    made.save_to_disk(f"{url}/saved")
    assert datasets.load_from_disk(f"{url}/saved")["text"] == made["text"]
    made.to_parquet(f"{url}/lines.parquet")
    streamed = datasets.load_dataset(
        "parquet", data_files=f"{url}/lines.parquet", split="train", streaming=True
    )
    assert [row["text"] for row in streamed] == list(made["text"])


if __name__ == "__main__":
    for through in (through_pandas, through_polars, through_duckdb, through_datasets):
        through(sys.argv[1])
        sys.stdout.write(f"{through.__name__.partition('_')[2]}: ok\n")
