"""Tools that the model may call: how a call is read from text, the contract of a tool, and the Python tool."""
