"""Train PyTorch models with a loop in which every action is a callback.

`from isaac_loop.all import *` brings every public name into a notebook; a script names what it takes, as in
`from isaac_loop.loop.trainer import Trainer`. Each folder is one thing that you may want to do;
`isaac_loop.loop` says which events there are and is the loop itself, and the callbacks in the other folders
do the work.
"""
__version__ = "0.1.0"
