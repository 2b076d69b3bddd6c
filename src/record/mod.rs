//! Records: the bounded recorder, the WAL, sealing to Parquet, and reading back.
