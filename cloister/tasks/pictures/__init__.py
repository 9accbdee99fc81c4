"""Images in folders or parquet files, decoded once into an array on disk."""
