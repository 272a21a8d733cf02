"""A coordinator that holds no parameters, shards that hold all, and replicas that compute (Sandblaster).

mailbox.py     how they write to each other
roles.py    what each does with what it is told
shards.py   the sync: who has which role, and the state
quasi_newton.py   the settings of L-BFGS
"""
