"""Search as a service: an index over passages, its server, and the client that agents ask.

corpus.jsonl --build--> index --serve--> POST /retrieve <--client-- environments of agents

The client needs the standard library only: workers of environments may have nothing else.
"""
