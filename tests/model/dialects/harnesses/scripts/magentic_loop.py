from common import API_KEY, BASE_URL, MODEL, QUESTIONS, SYSTEM, add
from magentic import Chat, FunctionCall, FunctionResultMessage, OpenaiChatModel, StreamedResponse

# connect
model = OpenaiChatModel(MODEL, base_url=BASE_URL, api_key=API_KEY)
chat = Chat(functions=[add], output_types=[StreamedResponse], model=model)
# connected
chat = chat.add_system_message(SYSTEM)
for question in QUESTIONS:
    chat, calls = chat.add_user_message(question), True
    while calls:
        chat = chat.submit()
        said = list(chat.last_message.content)
        calls = [each for each in said if isinstance(each, FunctionCall)]
        for call in calls:
            chat = chat.add_message(FunctionResultMessage(content=call(), function_call=call))
print(said[-1].to_string())
