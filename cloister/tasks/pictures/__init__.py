"""Images as users have them, in folders or in parquet files, decoded once into an array on the disk."""
