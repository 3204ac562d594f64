"""How fast a model runs, and how near that is to what the machine allows: the core of `tinygpt bench`.

Belongs here: measuring speed, records of it, and tables and pictures of records. A bench is a `plan` of cases
(`sweep`), each measured (`measure`) beside the machine's limits (`machine_limits`, `work`). They become `records`, and
these become text (`formats`), a picture (`picture`, `plot`) or a comparison (`compare`). May import `evaluation` and
whatever lies below it; only `plot` imports matplotlib.
"""
