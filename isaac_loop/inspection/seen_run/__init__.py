"A few batches run on the side, and what is seen of them"
