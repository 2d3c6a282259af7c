"""One function per cause: the ranks at fault and their evidence, told as a Report.

The files go by affair: `endings` (how a process ended), `rendezvous` (where the ranks were to
meet), `collectives` (calls that need every rank), `gpus`, `children` (processes of the program's
own), `resources` (what ran out), `stops` (the job was stopped, or nobody shows why). `exceptions`
chooses among them by what an exception says, and `classify.py` by how the ranks ended. All write in
the form of `form`, about the ranks of `cases`, with the words of `wording`; `abridged` cuts a long
traceback.
"""
