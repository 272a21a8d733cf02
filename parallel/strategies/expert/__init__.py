"""Expert parallelism: ranks with different samples have some of the experts each.

| file | holds |
|---|---|
| dispatch.py | positions on their way to the ranks that have their experts, and back |
| layers.py | a mixture of experts of which this rank has some; a shared expert that is computed meanwhile |
| dealing.py | a network rewritten for these ranks: which layer is replaced by what |
| expert_pass.py | the step: which gradients are summed over which axis |
| strategy.py | the trainer's constructor |
"""
