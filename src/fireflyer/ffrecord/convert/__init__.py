"""Other formats into record files and back: one `Source` a format, and one way to write.

`open_source` recognises what it is given; `pack`, `merge`, `split` and `export` move rows; `verify` and
`preview` look at record files. Nothing here imports torch, pyarrow or rich before it is needed.
"""
