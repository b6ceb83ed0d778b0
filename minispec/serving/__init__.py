"""The HTTP server: the engine in its own thread, asyncio in front."""
