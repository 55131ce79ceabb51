"How the callbacks of a trainer are written out as a plain loop"
