"""The same app in one process: no Ray, no network, no copies."""
