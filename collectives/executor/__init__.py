"""How a schedule runs: schedule -> Program -> Plan, for messages, for memory that ranks share, and for both.

| file | holds |
|---|---|
| program.py | `Program`: a rank's rounds as a list of instructions, without memory |
| fusing.py | a pass of the compiler: between two barriers each slice is written once |
| plan.py | `Plan`: a program bound to memory, the one executor; memory as bytes and as arrays |
"""
