"Rules that read the source of a loop: each finds mistakes of one kind"
