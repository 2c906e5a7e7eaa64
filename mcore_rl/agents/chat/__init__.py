"""From messages to token ids, and from sampled token ids to a message.

messages --ChatFormat--> token ids --engine--> sampled ids --AnswerParser--> message, tool calls
"""
