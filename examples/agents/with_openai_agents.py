from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI


async def run(task, session):
    @function_tool
    def price(item: str) -> str:
        """What an item costs."""
        return task["prices"][item]

    url = session.openai_base_url("clerk")
    async with AsyncOpenAI(base_url=url, api_key=session.api_key) as client:
        model = OpenAIChatCompletionsModel(model="clerk", openai_client=client)
        clerk = Agent(name="clerk", instructions="Be brief.", model=model, tools=[price])
        # Tracing would send what the agents say to OpenAI.
        result = await Runner.run(clerk, task["question"], run_config=RunConfig(tracing_disabled=True))
    return float(task["wanted"] in result.final_output)
