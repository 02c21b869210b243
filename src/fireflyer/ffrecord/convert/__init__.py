"""Conversion of other formats to record files and back: one `Source` per format, one writer.

`open_source` detects the format; `pack`, `merge`, `split` and `export` copy rows; `verify` and
`preview` inspect record files. No module here imports torch, pyarrow or rich before it is needed.
"""
