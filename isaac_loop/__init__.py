"""Train PyTorch models with a loop in which every action is a callback.

`from isaac_loop.all import *` brings every public name into a notebook; a script names what it takes, as in
`from isaac_loop.trainer import Trainer`. Read the modules in the order of their notebooks: `isaac_loop.events`
says which events there are, `isaac_loop.trainer` is the loop, and `isaac_loop.callbacks` does the work.
"""
__version__ = "0.1.0"
