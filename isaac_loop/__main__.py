"Run the demo: `python -m isaac_loop`"
from isaac_loop.recipes.demo import main

if __name__ == '__main__': main()
