"""Pipelines: the layers of a network in stages on different ranks, micro-batches one behind the other.

| file | holds |
|---|---|
| schedules.py | who does what in which order: gpipe, 1f1b, pipedream, interleaved, zero-bubble and more |
| actions.py, checking.py | the words of a schedule, and its text as CSV; whether it can run |
| picture.py | a schedule drawn, a block for each action |
| lowering.py | a schedule as rounds of Compute, Send and Recv, in buffers with slots |
| placement.py | a network cut into a schedule's stages, and who has which |
| step.py | the executor: rounds of actions and messages on one rank |
| executor.py | the pass of a trainer, made of such steps |
| pipedream.py | the pass with an update after every mini-batch |
| pipedream_step.py | its rounds, which go on from step to step, and the sizes of batches |
| weight_stashing.py | its updates, and older weights for mini-batches in flight |
| cost.py, timing.py | what a step costs; how long given stages take |
| option.py, strategy.py | what --pipeline says; the declaration: `parallel.Pipeline`, `parallel.PipeDream` |
"""
