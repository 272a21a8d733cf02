"""A coordinator that holds no parameters, shards that hold all, and replicas that compute (Sandblaster).

roles.py         what each role does with a message (parallel/sync/mailbox.py)
shards.py        the sync: which rank has which roles, and the state
quasi_newton.py  the settings of L-BFGS
"""
