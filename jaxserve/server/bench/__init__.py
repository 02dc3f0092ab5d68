"""`jaxserve bench serve`: measures any server that speaks OpenAI's API.

    prompts -> arrivals -> client (one timeline a request) -> figures -> table, JSON, plot
"""
