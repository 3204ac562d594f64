"""Speed of a model next to the limits of the machine: the core of `tinygpt bench`.

Belongs here: timing (`measure`), cases and their records (`sweep`), limits (`work`), published studies (`studies`,
`study_runs`), and records as text (`report`) and pictures (`plot`, the only module that imports matplotlib).
"""
