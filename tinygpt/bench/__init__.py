"""Speed of a model next to the limits of the machine: the core of `tinygpt bench`.

Belongs here: timing (`measure`), cases that are planned (`plan`) and measured (`sweep`), their work and the machine's limits
(`roofline`), published studies (`studies`), records (`record`), and their text and pictures (`report`).
"""
