"""The loop that ties scheduler, runner and outputs together, blocking and asynchronous."""
