"""What a run tells while it goes on and leaves behind when it ends."""
