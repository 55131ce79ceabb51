"What the source of callbacks says, read without running it"
