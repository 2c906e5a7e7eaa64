"""Names the Ray labels of nodes that `mcore-rl submit` started."""

NAME_LABEL = "mcore-rl/name"
"""The node's name in the job."""
ORDER_LABEL = "mcore-rl/order"
"""Its place in an order in which neighbors share switches."""
