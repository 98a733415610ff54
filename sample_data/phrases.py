"""The phrases that the sample's customer messages are put together from, in four languages.

Notation: ``<a/b>`` is a random choice, ``[casual|formal]`` the same phrase in two registers (English only),
``{slot}`` a value drawn by ``messages.py``. Nothing in a topic's phrases hints at a sentiment or an urgency: the
attributes of a message are drawn independently of one another.
"""

from __future__ import annotations

Phrases = dict[str, list[str]]

TOPICS = ("billing", "delivery", "returns", "account", "repair", "advice")
SENTIMENTS = ("positive", "neutral", "negative")
URGENCIES = ("low", "normal", "high")
LANGUAGES = ("english", "spanish", "german", "french")

ENGLISH: Phrases = {
    "greeting": [
        "[Hi there|Dear team],",
        "[Hey|Dear Sir or Madam],",
        "[Hello folks|Dear support team],",
        "[Hiya|Dear colleagues],",
    ],
    "billing": [
        "[I've|I have] been charged <twice/three times> for the {product}.",
        "The invoice for the {product} shows {price} euros [instead of|rather than] {price2}.",
        "[Can you|Could you please] explain the <fee/charge/amount> of {price} euros on my <bill/statement/invoice>?",
        "My card was <debited/billed> {price} euros on {day}, but [I didn't|I did not] buy anything <then/that week>.",
    ],
    "delivery": [
        "The parcel with the {product} [hasn't|has not] <arrived/turned up/reached me> yet.",
        "The courier [didn't|did not] ring on {day} and left the {product} <outside/next door/at the gate>.",
        "[Where's|Where is] the {product} that was <due/promised/announced> for {day}?",
        "Tracking says that the {product} [is stuck|is being held] in <Lyon/Hamburg/Madrid/Turin>.",
    ],
    "returns": [
        "[I'd|I would] like to send the {product} back because <it is too small/the colour is wrong/I ordered two>.",
        "How [do I|may I] <return/send back> the {product} [I got|that I received] on {day}?",
        "Please <exchange/swap> the {product} for a <bigger/smaller/lighter> one.",
        "[I've|I have] sent the {product} back and [I'm|I am] waiting for the <refund/money>.",
    ],
    "account": [
        "[I can't|I cannot] <log in/sign in> to my <profile/page> since {day}.",
        "The password link [doesn't|does not] work on my <phone/laptop/tablet>.",
        "Please change the <street/postcode/phone number> in my <profile/customer record>.",
        "[I want|I wish] to <close/delete/merge> my <user profile/customer profile>.",
    ],
    "repair": [
        "The {product} [won't|will not] <start/switch on/charge> since {day}.",
        "The {product} makes a <strange/loud/grinding> noise and [it's|it is] <hot/leaking/shaking>.",
        "The <handle/lid/cable/button> of the {product} [broke off|has broken off] after <two/three/five> weeks.",
        "The display of the {product} [is dead|no longer works] since <the update/{day}>.",
    ],
    "advice": [
        "Which {product} [d'you|do you] recommend for <a small kitchen/a family of four/a student>?",
        "Does the {product} [come with|include] a <charger/case/spare part>?",
        "[Is there|Do you have] a <cheaper/quieter/larger> {product} in <blue/white/black>?",
        "[What's|What is] the difference between the {product} and the {product2}?",
    ],
    "positive": [
        "[I'm|I am] <very/really/truly> <happy/pleased/delighted> with your <service/shop/team>.",
        "Your colleague was <so/very/really> <kind/helpful/friendly> [on the phone|by telephone].",
        "Thank you for the <wonderful/excellent/superb> <help/support> so far.",
        "[It's|It is] always a <pleasure/joy> to buy from you.",
        "[I love|I very much like] your <shop/service>.",
    ],
    "negative": [
        "[I'm|I am] <very/really/deeply> <disappointed/annoyed/upset> with your <service/shop/team>.",
        "Your colleague was <so/very/really> <rude/unhelpful/careless> [on the phone|by telephone].",
        "This is the <worst/poorest> <help/support> [I've|I have] ever had.",
        "[It's|It is] a <shame/disgrace> how you treat your customers.",
        "[I hate|I strongly dislike] your <shop/service>.",
    ],
    "neutral": [
        "",
        "[I'm|I am] writing about an earlier <request/question/call>.",
        "[I've|I have] been a customer since <2019/2020/2021>.",
        "[I saw|I have seen] your <page/notice/letter> on {day}.",
        "A neighbour [told me|advised me] to contact your <service/shop/team>.",
    ],
    "low": [
        "[There's|There is] no <hurry/rush> at all.",
        "<Whenever/Any time> it suits you [is fine|is acceptable].",
        "[It's|It is] not <pressing/important> at the moment.",
        "You can take <a few weeks/all the time you need>.",
    ],
    "normal": [
        "",
        "[I'd|I would] be glad of an answer <this week/in the coming days>.",
        "Please reply in the <usual/normal> time.",
        "[Let me know|Please inform me] when [you've|you have] looked at it.",
    ],
    "high": [
        "[I need|I require] an answer <today/within the hour/right away>!",
        "[It's|It is] <extremely/very> urgent.",
        "Please <act/react/respond> <immediately/at once>.",
        "[It can't|It cannot] wait until <tomorrow/Monday>.",
    ],
    "order": [
        "[My order's|My order is] {order}.",
        "The order number is {order}.",
        "[It's|It is] about order {order}.",
        "Reference: {order}.",
    ],
    "email": [
        "[Drop me a line|Please write to me] at {email}.",
        "My address for replies is {email}.",
        "[You can reach me|I can be reached] at {email}.",
        "E-mail: {email}.",
    ],
    "closing": [
        "[Cheers|Kind regards], {name}",
        "[Thx|Thank you], {name}",
        "[Bye|Yours sincerely], {name}",
        "[Thanks a lot 🙂|With many thanks], {name}",
    ],
    "product": [
        "kettle",
        "toaster",
        "keyboard",
        "lamp",
        "blender",
        "bicycle",
        "radio",
        "camera",
        "heater",
        "printer",
        "armchair",
        "fan",
    ],
    "day": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"],
    "reply": [
        "Thank you for your message. We will look into it and come back to you.",
        "We have received your message. A colleague will answer you soon.",
        "Thank you for writing. We have passed your message on to the right desk.",
    ],
}  # fmt: skip

SPANISH: Phrases = {
    "greeting": ["Hola,", "Buenos días,", "Buenas tardes,", "Estimado equipo,"],
    "billing": [
        "Me han cobrado <dos/tres> veces el {product}.",
        "La factura del {product} indica {price} euros en lugar de {price2}.",
        "¿Pueden explicarme el <cargo/importe> de {price} euros en mi <factura/cuenta bancaria>?",
    ],
    "delivery": [
        "El paquete con el {product} todavía no ha <llegado/aparecido>.",
        "El mensajero no llamó el {day} y dejó el {product} <fuera/en la puerta>.",
        "¿Dónde está el {product} <prometido/anunciado> para el {day}?",
    ],
    "returns": [
        "Quiero devolver el {product} porque <es demasiado pequeño/el color no es correcto/pedí dos>.",
        "¿Cómo puedo <devolver/enviar de vuelta> el {product} que recibí el {day}?",
        "Por favor, cambien el {product} por uno más <grande/pequeño/ligero>.",
    ],
    "account": [
        "No puedo <entrar/acceder> a mi <perfil/página> desde el {day}.",
        "El enlace de la contraseña no funciona en mi <teléfono/portátil>.",
        "Por favor, cambien <la calle/el código postal/el número de teléfono> en mi perfil.",
    ],
    "repair": [
        "El {product} no <arranca/se enciende/carga> desde el {day}.",
        "El {product} hace un ruido <extraño/fuerte> y está <caliente/goteando>.",
        "<El asa/La tapa/El cable/El botón> del {product} se rompió después de <dos/tres/cinco> semanas.",
    ],
    "advice": [
        "¿Qué {product} recomiendan para <una cocina pequeña/una familia/un estudiante>?",
        "¿El {product} incluye <cargador/funda/una pieza de repuesto>?",
        "¿Hay un {product} más <barato/silencioso/grande> en <azul/blanco/negro>?",
    ],
    "positive": [
        "Estoy muy <contento/satisfecho/feliz> con su <servicio/tienda/equipo>.",
        "Su compañero fue muy <amable/atento/simpático> por teléfono.",
        "Gracias por la <maravillosa/excelente> ayuda hasta ahora.",
    ],
    "negative": [
        "Estoy muy <decepcionado/molesto/enfadado> con su <servicio/tienda/equipo>.",
        "Su compañero fue muy <grosero/descuidado> por teléfono.",
        "Es la <peor/más pobre> ayuda que he recibido nunca.",
    ],
    "neutral": [
        "",
        "Escribo por una <consulta/llamada/pregunta> anterior.",
        "Soy cliente desde <2019/2020/2021>.",
        "Vi su <página/aviso/carta> el {day}.",
    ],
    "low": [
        "No hay ninguna <prisa/urgencia>.",
        "No es <importante/apremiante> por el momento.",
        "Pueden tomarse <unas semanas/todo el tiempo necesario>.",
    ],
    "normal": [
        "",
        "Me gustaría una respuesta <esta semana/en los próximos días>.",
        "Respondan en el plazo <habitual/normal>.",
    ],
    "high": [
        "¡Necesito una respuesta <hoy/en una hora/ahora mismo>!",
        "Es <muy/extremadamente> urgente.",
        "No puede esperar hasta <mañana/el lunes>.",
    ],
    "order": ["Mi pedido es {order}.", "El número de pedido es {order}.", "Referencia: {order}."],
    "email": ["Escríbanme a {email}.", "Mi dirección para respuestas es {email}.", "Correo: {email}."],
    "closing": ["Saludos, {name}", "Gracias 🙂, {name}", "Atentamente, {name}"],
    "product": ["hervidor", "teclado", "reloj", "altavoz", "ventilador", "horno", "sillón", "móvil"],
    "day": ["lunes", "martes", "miércoles", "jueves", "viernes", "sábado", "domingo"],
    "reply": [
        "Gracias por su mensaje. Lo revisaremos y le responderemos.",
        "Hemos recibido su mensaje. Un compañero le contestará pronto.",
    ],
}  # fmt: skip

GERMAN: Phrases = {
    "greeting": ["Hallo,", "Guten Tag,", "Guten Morgen,", "Liebes Team,"],
    "billing": [
        "Mir wurde das {product} <zweimal/dreimal> berechnet.",
        "Die Rechnung für das {product} nennt {price} Euro statt {price2}.",
        "Können Sie mir <die Gebühr/den Betrag> von {price} Euro auf meiner <Rechnung/Abrechnung> erklären?",
    ],
    "delivery": [
        "Das Paket mit dem {product} ist noch nicht <angekommen/eingetroffen>.",
        "Der Bote hat am {day} nicht geklingelt und das {product} <draußen/vor dem Tor> abgestellt.",
        "Wo bleibt das {product}, das für {day} <versprochen/angekündigt> war?",
    ],
    "returns": [
        "Ich möchte das {product} zurückgeben, weil <es zu klein ist/die Farbe nicht stimmt/ich zwei bestellt habe>.",
        "Wie kann ich das {product} <zurückgeben/zurückschicken>, das am {day} kam?",
        "Bitte tauschen Sie das {product} gegen ein <größeres/kleineres/leichteres>.",
    ],
    "account": [
        "Ich kann mich seit {day} nicht <anmelden/einloggen>.",
        "Der Link für das Passwort geht auf meinem <Telefon/Laptop> nicht.",
        "Bitte ändern Sie <die Straße/die Postleitzahl/die Telefonnummer> in meinem Profil.",
    ],
    "repair": [
        "Das {product} <startet/lädt> seit {day} nicht mehr.",
        "Das {product} macht ein <seltsames/lautes> Geräusch und <wird heiß/wackelt>.",
        "<Der Griff/Der Deckel/Das Kabel/Der Knopf> am {product} ist nach <zwei/drei/fünf> Wochen abgebrochen.",
    ],
    "advice": [
        "Welches {product} empfehlen Sie für <eine kleine Küche/eine Familie/einen Studenten>?",
        "Ist beim {product} <ein Ladegerät/eine Hülle/ein Ersatzteil> dabei?",
        "Gibt es ein <günstigeres/leiseres/größeres> {product} in <Blau/Weiß/Schwarz>?",
    ],
    "positive": [
        "Ich bin sehr <zufrieden/glücklich> mit Ihrem <Service/Laden/Team>.",
        "Ihr Kollege war sehr <nett/hilfsbereit/freundlich> am Telefon.",
        "Danke für die <wunderbare/ausgezeichnete> Hilfe bisher.",
    ],
    "negative": [
        "Ich bin sehr <enttäuscht/verärgert> von Ihrem <Service/Laden/Team>.",
        "Ihr Kollege war sehr <unhöflich/nachlässig> am Telefon.",
        "Das ist die <schlechteste/schwächste> Hilfe, die ich je bekam.",
    ],
    "neutral": [
        "",
        "Ich schreibe wegen <einer früheren Anfrage/eines früheren Anrufs>.",
        "Ich bin Kunde seit <2019/2020/2021>.",
        "Ich habe am {day} <Ihre Seite/Ihren Hinweis/Ihren Brief> gesehen.",
    ],
    "low": [
        "Es hat <überhaupt keine/gar keine> Eile.",
        "Es ist im Moment nicht <wichtig/dringlich>.",
        "Lassen Sie sich ruhig <ein paar Wochen/alle nötige> Zeit.",
    ],
    "normal": [
        "",
        "Über eine Antwort <in dieser Woche/in den nächsten Tagen> freue ich mich.",
        "Bitte antworten Sie in der <üblichen/normalen> Zeit.",
    ],
    "high": [
        "Ich brauche <heute/sofort/binnen einer Stunde> eine Antwort!",
        "Es ist <sehr/äußerst> dringend.",
        "Es kann nicht bis <morgen/Montag> warten.",
    ],
    "order": ["Meine Bestellung ist {order}.", "Die Bestellnummer lautet {order}.", "Zeichen: {order}."],
    "email": ["Schreiben Sie mir an {email}.", "Meine Adresse für Antworten ist {email}.", "Mail: {email}."],
    "closing": ["Viele Grüße, {name}", "Danke 🙂, {name}", "Mit freundlichen Grüßen, {name}"],
    "product": ["Radio", "Tablet", "Bügeleisen", "Fahrrad", "Regal", "Sofa", "Waffeleisen", "Handy"],
    "day": ["Montag", "Dienstag", "Mittwoch", "Donnerstag", "Freitag", "Samstag", "Sonntag"],
    "reply": [
        "Danke für Ihre Nachricht. Wir prüfen sie und melden uns.",
        "Wir haben Ihre Nachricht erhalten. Ein Kollege antwortet bald.",
    ],
}  # fmt: skip

FRENCH: Phrases = {
    "greeting": ["Bonjour,", "Bonsoir,", "Chère équipe,", "Salut,"],
    "billing": [
        "On m'a facturé <deux/trois> fois le {product}.",
        "La facture du {product} indique {price} euros au lieu de {price2}.",
        "Pouvez-vous m'expliquer <les frais/le montant> de {price} euros sur <ma facture/mon relevé> ?",
    ],
    "delivery": [
        "Le colis avec le {product} n'est pas encore <arrivé/apparu>.",
        "Le livreur n'a pas sonné {day} et a laissé le {product} <dehors/devant la porte>.",
        "Où est le {product} <promis/annoncé> pour {day} ?",
    ],
    "returns": [
        "Je voudrais rendre le {product} parce que <il est trop petit/la couleur ne va pas/j'en ai commandé deux>.",
        "Comment puis-je <rendre/renvoyer> le {product} reçu {day} ?",
        "Merci d'échanger le {product} contre un modèle plus <grand/petit/léger>.",
    ],
    "account": [
        "Je ne peux plus <me connecter/entrer> sur <mon profil/ma page> depuis {day}.",
        "Le lien du mot de passe ne marche pas sur mon <téléphone/ordinateur>.",
        "Merci de changer <la rue/le code postal/le numéro de téléphone> dans mon profil.",
    ],
    "repair": [
        "Le {product} ne <démarre/charge> plus depuis {day}.",
        "Le {product} fait un bruit <étrange/fort> et il <chauffe/fuit/tremble>.",
        "<La poignée/Le couvercle/Le câble/Le bouton> du {product} a cassé après <deux/trois/cinq> semaines.",
    ],
    "advice": [
        "Quel {product} conseillez-vous pour <une petite cuisine/une famille/un étudiant> ?",
        "Le {product} est-il vendu avec <un chargeur/un étui/une pièce de rechange> ?",
        "Avez-vous un {product} plus <économique/silencieux/grand> en <bleu/blanc/noir> ?",
    ],
    "positive": [
        "Je suis très <content/satisfait/heureux> de votre <service/magasin/équipe>.",
        "Votre collègue a été très <gentil/aimable/serviable> au téléphone.",
        "Merci pour l'aide <formidable/excellente> jusqu'ici.",
    ],
    "negative": [
        "Je suis très <déçu/fâché/mécontent> de votre <service/magasin/équipe>.",
        "Votre collègue a été très <impoli/négligent> au téléphone.",
        "C'est la <pire/plus mauvaise> aide que j'aie jamais eue.",
    ],
    "neutral": [
        "",
        "J'écris au sujet <d'une demande/d'une question/d'un appel> d'avant.",
        "Je suis client depuis <2019/2020/2021>.",
        "J'ai vu votre <page/avis/lettre> {day}.",
    ],
    "low": [
        "Il n'y a <vraiment/absolument> rien qui presse.",
        "Ce n'est pas <important/pressant> pour le moment.",
        "Prenez <quelques semaines/tout votre temps>.",
    ],
    "normal": [
        "",
        "J'aimerais une réponse <cette semaine/dans les prochains jours>.",
        "Merci de répondre dans le délai <habituel/normal>.",
    ],
    "high": [
        "Il me faut une réponse <aujourd'hui/dans l'heure/tout de suite> !",
        "C'est <très/extrêmement> urgent.",
        "Cela ne peut pas attendre <demain/lundi>.",
    ],
    "order": ["Ma commande est {order}.", "Le numéro de commande est {order}.", "Référence : {order}."],
    "email": ["Écrivez-moi à {email}.", "Mon adresse pour les réponses est {email}.", "Courriel : {email}."],
    "closing": ["Cordialement, {name}", "Merci 🙂, {name}", "Bien à vous, {name}"],
    "product": ["grille-pain", "clavier", "canapé", "vélo", "téléphone", "ventilateur", "fauteuil", "mixeur"],
    "day": ["lundi", "mardi", "mercredi", "jeudi", "vendredi", "samedi", "dimanche"],
    "reply": [
        "Merci de votre message. Nous l'étudions et revenons vers vous.",
        "Nous avons bien reçu votre message. Un collègue vous répondra.",
    ],
}  # fmt: skip

PHRASES: dict[str, Phrases] = {"english": ENGLISH, "spanish": SPANISH, "german": GERMAN, "french": FRENCH}

FIRST_NAMES = (
    "Anna", "Ben", "Clara", "David", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Karim", "Laura", "Marco",
    "Nadia", "Oscar", "Paula", "Quentin", "Rosa", "Samir", "Tessa", "Ulla", "Victor", "Wanda", "Yusuf", "Zoe",
)  # fmt: skip
LAST_NAMES = (
    "Abbott", "Becker", "Costa", "Dubois", "Evans", "Fischer", "Garcia", "Haddad", "Ivanov", "Jensen", "Keller",
    "Lopez", "Moreau", "Novak", "Olsen", "Petit", "Rossi", "Schmidt", "Torres", "Usman", "Vargas", "Weber", "Young",
)  # fmt: skip
DOMAINS = ("example.com", "example.org", "example.net", "mail.example", "post.example")
