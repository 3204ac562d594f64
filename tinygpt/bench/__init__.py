"""Speed of a model next to the limits of the machine: the core of `tinygpt bench`.

Belongs here: timing (`measure`), cases that are planned (`plan`) and measured (`sweep`), their work and the limits of
the machine (`roofline`), published studies (`studies`), records (`record`), their text and pictures (`report`).
"""
