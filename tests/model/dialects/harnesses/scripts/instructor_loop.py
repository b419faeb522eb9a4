import instructor
from common import API_KEY, BASE_URL, MODEL, QUESTIONS
from openai import OpenAI
from pydantic import BaseModel

# connect
client = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=API_KEY), mode=instructor.Mode.MD_JSON)
# connected


class Sum(BaseModel):
    total: int


messages = []
for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    given, reply = client.chat.completions.create_with_completion(
        model=MODEL, messages=messages, response_model=Sum, max_retries=2
    )
    messages.append({"role": "assistant", "content": reply.choices[0].message.content})
print(given.total)
