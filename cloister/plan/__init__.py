"""What a run would cost, before it runs: `cloister plan`. Nothing is sent, spent or written."""
