"Rules about batches that were run: each finds mistakes of one kind"
