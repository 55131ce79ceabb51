"What a callback should hold to, and the runs that show whether it does"
