"""Episodes of several turns: a policy that talks with an environment, tools or any program.

environment --messages--> recorder --token ids--> engine
     ^                        |
     +-----answer, calls------+--> turn tree --> rows to train on
"""
