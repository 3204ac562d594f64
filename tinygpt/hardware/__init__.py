"""The machine itself: its CPU's name, its cores, its memory and how fast that is read.

Belongs here: whatever asks the operating system, or measures the machine without a model. May import errors alone.
"""
