"Decorators that gather what tests plant, and what is like it and right."


class Marked(list):
    "Functions or classes, each marked by the list itself as a decorator"

    def __call__(self, make):
        self.append(make)
        return make


class Planted(list):
    "Pairs of a function or class in which something is wrong, and the names of what is to be found"

    def __call__(self, *names):
        def mark(make):
            self.append((make, names))
            return make

        return mark
